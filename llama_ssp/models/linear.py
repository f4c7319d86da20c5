"""Linear layers with the kernel that is fastest on this machine.

All kernels compute y = x W^T + b and agree up to rounding. For the few rows of a decoding step, the usual fp32 matrix
product of a CPU stays far below memory bandwidth, which the kernels of `cpu_kernels` reach; they take fp32 weights, in
16 bits where fp16 holds them. For other layers (of another number format, no whole blocks, or tied to an embedding)
each weight shape is timed once, with one row and with a few. Ranks may choose different kernels, and then differ only
by rounding.

Shapes: M rows (tokens), I inputs, O outputs.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.distributed.comms import is_recording

_TIMED_ROWS = (1, 5)
_MIN_CALLS, _TURN, _BUDGET_S = 8, 4, 2e-3
_HALF_TOP = 14
"""Exponent of a scaled weight's largest value; fp16 ends at 2^16."""
_BLOCK_ROWS = 512


class Linear(Protocol):
    """A linear layer with its weights; a subclass writes at least the product."""

    @abstractmethod
    def __call__(self, x_MI: Tensor) -> Tensor:
        """Map x to (M, O), contiguous."""

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """Map x and add the residual, which may be overwritten."""
        return self(x_MI).add_(residual_MO)


class PlainLinear(Linear):
    """torch's product, on the weight as it is.

    Attributes:
        weight_OI, bias_O: of the layer.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI = weight_OI
        self._weight_IO = weight_OI.t()
        self.bias_O = bias_O

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        return functional.linear(x_MI, self.weight_OI, self.bias_O)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        if self.bias_O is None:
            return residual_MO.addmm_(x_MI, self._weight_IO)
        return self(x_MI).add_(residual_MO)


class ColumnsLinear(PlainLinear):
    """For a few rows the transposed product W x^T, which is faster in MKL; otherwise the plain one."""

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        if not 1 < x_MI.shape[0] <= 8:  # noqa: PLR2004 - the rows of a verification
            return super().__call__(x_MI)
        y_MO = torch.mm(self.weight_OI, x_MI.t()).t().contiguous()
        return y_MO if self.bias_O is None else y_MO.add_(self.bias_O)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x_MI).add_(residual_MO)


def packed_linear(x_MI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """OneDNN's product on a packed weight, as an operator without a list argument, which a trace cannot hold."""
    y_MO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_MI, packed, bias_O, "none", [], "")
    return y_MO


_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
for _kind_of_weight in ("CPU", "MkldnnCPU"):
    _library.impl("packed_linear", packed_linear, _kind_of_weight)


class PackedLinear(Linear):
    """oneDNN's product on a packed weight. The operators are private to torch: check `can_pack` first."""

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


class HalfLinear(Linear):
    """FBGEMM's product of fp32 rows with a weight in fp16, which is widened in registers: half the bytes to read.

    Sums are in fp32, so the result equals that of the fp32 weight if fp16 holds it: check `half_scale` first. The fp32
    weight is multiplied by `scale`, a power of two, before it is stored.
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


Kernel = Callable[[Tensor, Tensor | None], Linear]


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch and the CPU support the packed product for a dtype."""
    return _works(lambda: PackedLinear(torch.ones(16, 16, dtype=dtype), None).add(*torch.ones(2, 2, 16, dtype=dtype)))


@cache
def can_halve() -> bool:
    """Whether torch and the CPU support the product with a weight in fp16."""
    return _works(lambda: HalfLinear(torch.ones(16, 16), None)(torch.ones(2, 16)))


def _works(product: Callable[[], Tensor]) -> bool:
    try:
        product()
    except (AttributeError, RuntimeError):
        return False
    return True


def half_scale(weight_OI: Tensor) -> float | None:
    """The power of two to multiply a weight by so that fp16 holds it; None if there is none.

    fp16 holds a weight if no value changes by more than fp32 rounds the largest one. That is true of weights from bf16
    or fp16 checkpoints and practically no others: values with 24 significant bits change by 2^-12.
    """
    smallest, greatest = torch.aminmax(weight_OI)
    largest = max(-float(smallest), float(greatest))
    if not 0 < largest < math.inf:
        return None
    fitting = 2.0 ** (_HALF_TOP - math.frexp(largest)[1])
    return next((scale for scale in (1.0, fitting) if _is_held(weight_OI, scale, largest)), None)


def _is_held(weight_OI: Tensor, scale: float, largest: float) -> bool:
    """Compare in blocks of rows, to avoid a second copy of a large weight."""
    most = torch.finfo(torch.float32).eps * largest
    return all(
        bool(((rows * scale).half().float().mul_(1 / scale) - rows).abs_().max() <= most)
        for rows in weight_OI.split(_BLOCK_ROWS)
    )


_fastest: dict[tuple[torch.Size, torch.dtype, bool], Kernel] = {}


def make_linear(
    weight_OI: Tensor, bias_O: Tensor | None, *, kernel: Kernel | None = None, keeps_weight: bool = False
) -> Linear:
    """Make a linear layer with the fastest kernel; timed once per shape and process, if there is a choice.

    In fp32 on the CPU a weight from a 16-bit checkpoint is kept in 16 bits: half the bytes are fastest, and the memory
    plan relies on it.

    The caller should drop the contiguous weight, because a packed kernel holds a copy. With `keeps_weight` the weight
    stays in memory anyway, as a tied embedding does, and no packed kernel is chosen. A given `kernel` is not timed.
    """
    if kernel is None:
        kernel = _choose(weight_OI, keeps_weight=keeps_weight)
    return kernel(weight_OI, bias_O)


def _choose(weight_OI: Tensor, *, keeps_weight: bool) -> Kernel:
    if weight_OI.device.type != "cpu":
        return PlainLinear
    if weight_OI.dtype == torch.float32 and (scale := half_scale(weight_OI)):
        kernel = _half_kernel(weight_OI.shape)
        if kernel:
            return partial(kernel, scale=scale)
    if weight_OI.dtype == torch.float32 and not keeps_weight and (kernel := _native_kernel("singles", weight_OI.shape)):
        return kernel
    key = weight_OI.shape, weight_OI.dtype, keeps_weight
    if key not in _fastest:
        kernels: list[Kernel] = [PlainLinear, ColumnsLinear]
        if not keeps_weight and can_pack(weight_OI.dtype):
            kernels.append(PackedLinear)
        _fastest[key] = _find_fastest(kernels, weight_OI)
    return _fastest[key]


def _half_kernel(shape: torch.Size) -> Callable[..., Linear] | None:
    """What multiplies by weights in fp16: a compiled kernel, or FBGEMM's."""
    return _native_kernel("halves", shape) or (HalfLinear if can_halve() else None)


def _native_kernel(kind: str, shape: torch.Size) -> Callable[..., Linear] | None:
    """The compiled kernel of a kind of weights, if this CPU has it for this shape."""
    from llama_ssp.models.native.linear import fits, native_floats  # noqa: PLC0415 - that module imports this one

    return partial(native_floats, kind) if fits(kind, shape) else None


@torch.inference_mode()
def _find_fastest(kernels: Sequence[Kernel], weight_OI: Tensor) -> Kernel:
    """The kernel with the least total time for one row and for a few rows.

    Kernels alternate after a few calls each, because the layers of a model use the same kernel in sequence.
    Alternating single calls would favour kernels that share a weight, and would find every kernel's code cold.
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
