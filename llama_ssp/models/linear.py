"""Linear layers in the form that is fastest on this machine, found by timing at load.

All forms compute y = x W^T + b and agree up to rounding. On the CPU the usual matrix product of fp32 is far from the
memory's speed for the few rows of a decoding step; oneDNN's packed layout is not, but loses for small matrices. So
every shape of weight is timed once, at one row and at a few. Weights that fp16 holds are the exception: half the bytes
always win. Ranks may choose differently: their sums differ by rounding only.

Shapes: M rows (tokens), I inputs, O outputs.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.distributed.operators import is_recording

_TIMED_ROWS = (1, 5)
_MIN_CALLS, _TURN, _BUDGET_S = 8, 4, 2e-3
_HALF_TOP = 14
"""Exponent that a scaled weight's largest value gets; fp16 ends at 2^16."""
_BLOCK_ROWS = 512


class Linear(Protocol):
    """A linear layer with its weights inside."""

    def __call__(self, x_MI: Tensor) -> Tensor:
        """Map x to (M, O), contiguous."""
        ...

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """Map x and add the residual, which may be overwritten."""
        ...


class PlainLinear:
    """The library's own product, on the weight as it is."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI
        self._weight_IO = weight_OI.t()
        self._bias_O = bias_O

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.linear(x_MI, self._weight_OI, self._bias_O)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        if self._bias_O is None:
            return residual_MO.addmm_(x_MI, self._weight_IO)
        return self(x_MI).add_(residual_MO)


class ColumnsLinear(PlainLinear):
    """For a few rows the transposed product W x^T, which MKL does better; else the plain one."""

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        if not 1 < x_MI.shape[0] <= 8:  # noqa: PLR2004 - the rows of a verification
            return super().__call__(x_MI)
        y_MO = torch.mm(self._weight_OI, x_MI.t()).t().contiguous()
        return y_MO if self._bias_O is None else y_MO.add_(self._bias_O)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x_MI).add_(residual_MO)


def packed_linear(x_MI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """OneDNN's product on a weight in its own layout, without the list in its arguments that no recording can hold."""
    y_MO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_MI, packed, bias_O, "none", [], "")
    return y_MO


_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
for _kind_of_weight in ("CPU", "MkldnnCPU"):
    _library.impl("packed_linear", packed_linear, _kind_of_weight)


class PackedLinear:
    """oneDNN's product on a weight in its own layout. The operators are private to torch: ask `can_pack` first."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _TIMED_ROWS[-1])
        self._bias_O = bias_O
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        product = torch.ops.llama_ssp.packed_linear if is_recording() else packed_linear
        y_MO: Tensor = product(x_MI, self._packed, self._bias_O)
        return y_MO

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        y_MO: Tensor = self._sum(x_MI, residual_MO, self._packed, self._bias_O, "add")
        return y_MO


class HalfLinear:
    """FBGEMM's product of fp32 rows with a weight in fp16, which is widened in registers: half the bytes to read.

    Sums are in fp32, so that the result is that of the weight in fp32 as far as fp16 holds it: ask `half_scale` first.

    Args:
        weight_OI: fp32.
        bias_O: or None.
        scale: a power of two, by which the weight is multiplied before it is stored.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, scale: float = 1.0) -> None:
        if scale != 1.0:
            weight_OI = weight_OI * scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
        self._product = torch.ops.quantized.linear_dynamic_fp16
        self._bias_O = bias_O
        self._unscale = 1 / scale

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        y_MO: Tensor = self._product(x_MI, self._packed)
        if self._unscale != 1.0:
            y_MO.mul_(self._unscale)
        return y_MO if self._bias_O is None else y_MO.add_(self._bias_O)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x_MI).add_(residual_MO)


Kernel = Callable[[Tensor, Tensor | None], Linear]


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and this processor have the packed product for a number format."""
    try:
        PackedLinear(torch.ones(16, 16, dtype=dtype), None).add(*torch.ones(2, 2, 16, dtype=dtype))
    except (AttributeError, RuntimeError):
        return False
    return True


@cache
def can_halve() -> bool:
    """Whether this build and this processor have the product with a weight in fp16."""
    try:
        HalfLinear(torch.ones(16, 16), None)(torch.ones(2, 16))
    except (AttributeError, RuntimeError):
        return False
    return True


def half_scale(weight_OI: Tensor) -> float | None:
    """The power of two by which a weight is multiplied so that fp16 holds it; None when fp16 does not.

    Held means that no value moves by more than fp32 rounds the largest one. So it is for all weights that come from
    bf16 or fp16, and for no others of any size: values of 24 bits move by 2^-12.
    """
    smallest, greatest = torch.aminmax(weight_OI)
    largest = max(-float(smallest), float(greatest))
    if not 0 < largest < math.inf:
        return None
    fitting = 2.0 ** (_HALF_TOP - math.frexp(largest)[1])
    return next((scale for scale in (1.0, fitting) if _is_held(weight_OI, scale, largest)), None)


def _is_held(weight_OI: Tensor, scale: float, largest: float) -> bool:
    """Compare in blocks of rows, so that no second copy of a large weight comes to be."""
    most = torch.finfo(torch.float32).eps * largest
    return all(
        bool(((rows * scale).half().float().mul_(1 / scale) - rows).abs_().max() <= most)
        for rows in weight_OI.split(_BLOCK_ROWS)
    )


_fastest: dict[tuple[torch.Size, torch.dtype, bool], Kernel] = {}


def make_linear(
    weight_OI: Tensor, bias_O: Tensor | None, *, kernel: Kernel | None = None, keeps_weight: bool = False
) -> Linear:
    """Put a weight into the form that is fastest for it; once timed, a choice stays for its shape in this process.

    In fp32 on the CPU a weight that comes from a 16-bit checkpoint is kept in 16 bits: nothing is as fast as half the
    bytes, and what a plan counts on is not left to timing.

    Args:
        weight_OI: contiguous; the caller should let go of it, since a packed form holds a copy.
        bias_O: or None.
        kernel: the form to take without timing.
        keeps_weight: the weight stays in memory anyhow (an embedding uses it too), so no full copy shall be made.
    """
    if kernel is None:
        kernel = _choose(weight_OI, keeps_weight=keeps_weight)
    return kernel(weight_OI, bias_O)


def _choose(weight_OI: Tensor, *, keeps_weight: bool) -> Kernel:
    if weight_OI.device.type != "cpu":
        return PlainLinear
    if weight_OI.dtype == torch.float32 and can_halve() and (scale := half_scale(weight_OI)):
        return partial(HalfLinear, scale=scale)
    key = weight_OI.shape, weight_OI.dtype, keeps_weight
    if key not in _fastest:
        kernels: list[Kernel] = [PlainLinear, ColumnsLinear]
        if not keeps_weight and can_pack(weight_OI.dtype):
            kernels.append(PackedLinear)
        _fastest[key] = _find_fastest(kernels, weight_OI)
    return _fastest[key]


@torch.inference_mode()
def _find_fastest(kernels: Sequence[Kernel], weight_OI: Tensor) -> Kernel:
    """The kernel with the least time for one row plus that for a few rows.

    Kernels take turns of a few calls each, as layers of a model follow each other with the same one. Single calls in
    turn would flatter those that share a weight, and find the code of all of them cold.
    """
    linears = [kernel(weight_OI, None) for kernel in kernels]
    sums_s = [0.0] * len(kernels)
    for num_rows in _TIMED_ROWS:
        x_MI = torch.ones(num_rows, weight_OI.shape[1], dtype=weight_OI.dtype)
        best_s = [float("inf")] * len(kernels)
        began = time.perf_counter()
        num_calls = 0
        while num_calls < _MIN_CALLS or time.perf_counter() - began < _BUDGET_S * len(kernels):
            for number, linear in enumerate(linears):
                for _ in range(_TURN):
                    started = time.perf_counter()
                    linear(x_MI)
                    best_s[number] = min(best_s[number], time.perf_counter() - started)
            num_calls += _TURN
        sums_s = [total + best for total, best in zip(sums_s, best_s, strict=True)]
    return kernels[sums_s.index(min(sums_s))]
