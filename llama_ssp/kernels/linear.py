"""Linear layers with the kernel that is fastest on this machine.

All kernels compute y = x W^T + b and agree up to rounding. For the few rows of a decoding step, the usual fp32 matrix
product of a CPU stays far below memory bandwidth. `make_linear` takes the first of these that can be had:

    kernel          weights                                                  elsewhere
    an operator     any for which the device has a faster product            `operators`
    `HalfLinear`    fp32 that fp16 holds, of any size                        FBGEMM
    `PackedLinear`  others that may be copied (tied ones may not)            oneDNN
    `PlainLinear`   all                                                      torch

Shapes: M rows (tokens), I inputs, O outputs.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.registry import operators

_FEW_ROWS = 5
"""The number of rows for which oneDNN packs a weight."""
_HALF_TOP = 14
"""Exponent of a scaled weight's largest value; fp16 ends at 2^16."""
_BLOCK_ROWS = 512


class FewRows(Protocol):
    """Products of a few rows of a GPU with packed weights: a module of kernels."""

    product_of_few_rows: Callable[..., Tensor]
    unpack_bytes: Callable[..., None]
    unpack_codes: Callable[..., None]
    choose: Callable[..., Any]


class Linear(Protocol):
    """A linear layer with its weights."""

    @abstractmethod
    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """Map x to (M, O), contiguous, and add the residual, which may be overwritten."""


def added(y_MO: Tensor, *others: Tensor | None) -> Tensor:
    """Add a bias and a residual to a product in place, as far as they are given."""
    for other in others:
        if other is not None:
            y_MO.add_(other)
    return y_MO


class PlainLinear(Linear):
    """torch's product, on the weight as it is."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI = weight_OI
        self._weight_IO = weight_OI.t()
        self.bias_O = bias_O

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        if residual_MO is not None and self.bias_O is None:
            return residual_MO.addmm_(x_MI, self._weight_IO)
        return added(functional.linear(x_MI, self.weight_OI, self.bias_O), residual_MO)


class PackedLinear(Linear):
    """oneDNN's product on a packed weight. The operators are private to torch: check `can_pack` first."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _FEW_ROWS)
        self._bias_O = bias_O
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._sum = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        y_MO: Tensor
        if residual_MO is None:
            y_MO = self._product(x_MI, self._packed, self._bias_O, "none", [], "")
        else:
            y_MO = self._sum(x_MI, residual_MO, self._packed, self._bias_O, "add")
        return y_MO

    def __deepcopy__(self, memo: object) -> "PackedLinear":
        """Copy the layer; torch does not copy packed weights by itself."""
        return PackedLinear(self._packed.to_dense(), self._bias_O)


class HalfLinear(Linear):
    """FBGEMM's product of fp32 rows with a weight in fp16, which is widened in registers: half the bytes to read.

    Sums are in fp32, so the result equals the fp32 weight's if fp16 holds it: check `half_scale` first. The fp32
    weight is multiplied by `scale`, a power of two, before it is stored.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, scale: float = 1.0) -> None:
        if scale != 1.0:
            weight_OI = weight_OI * scale
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI, None)
        self._product = torch.ops.quantized.linear_dynamic_fp16
        self._bias_O = bias_O
        self._unscale = 1 / scale

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        y_MO: Tensor = self._product(x_MI, self._packed)
        if self._unscale != 1.0:
            y_MO.mul_(self._unscale)
        return added(y_MO, self._bias_O, residual_MO)


class NativeLinear(Linear):
    """A product by an operator of a device, which can include the norm before it and the gate after it.

    It runs the same operators whatever its inputs are, and the bits of a row depend on no other row and on no number of
    threads. Rows, sums and results are fp32; rows in other number formats are converted.

    Attributes:
        least_square: see `take_in`.
    """

    least_square = 0.0

    @abstractmethod
    def take_in(self, norm: Tensor, least_square: float, *, gates: bool) -> bool:
        """Make `fused` compute the RMS norm before the product, and the gate after it, too.

        Args:
            norm: weight (I,) of the norm, in fp32; empty for none.
            least_square: what is added to the sum of the squares of a row.
            gates: outputs are gate and up of an MLP, and the result is silu(gate) * up.

        Returns False, and changes nothing, if the operator cannot do it.
        """

    @abstractmethod
    def fused(self, x_MI: Tensor) -> Tensor:
        """Norm, product and gate of fp32 rows; only after `take_in`."""


def native_of(linear: Linear) -> NativeLinear | None:
    """The layer, if an operator of a device computes it."""
    return linear if isinstance(linear, NativeLinear) else None


def compiled_for(storage: str, shape: torch.Size, device: torch.device) -> Callable[..., NativeLinear] | None:
    """The function that makes a layer of packed weights, scales and a bias; None where torch unpacks them."""
    found: Callable[..., NativeLinear] | None = operators.made("packed_linear", device.type, storage, shape)
    return found


Kernel = Callable[[Tensor, Tensor | None], Linear]


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch and the CPU support the packed product for a dtype."""
    return _works(lambda: PackedLinear(torch.ones(16, 16, dtype=dtype), None)(*torch.ones(2, 2, 16, dtype=dtype)))


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
    most = torch.finfo(torch.float32).eps * largest

    def is_held(scale: float) -> bool:
        return all(  # in blocks of rows, to avoid a second copy of a large weight
            bool(((rows.float() * scale).half().float().mul_(1 / scale) - rows).abs_().max() <= most)
            for rows in weight_OI.split(_BLOCK_ROWS)
        )

    return next(filter(is_held, (1.0, fitting)), None)


def make_linear(
    weight_OI: Tensor, bias_O: Tensor | None, *, kernel: Kernel | None = None, keeps_weight: bool = False
) -> Linear:
    """Make a linear layer with the fastest kernel for this weight.

    In fp32 on the CPU a weight from a 16-bit checkpoint is kept in 16 bits: half the bytes are fastest, and the memory
    plan relies on it.

    The caller should drop the contiguous weight, because a packed kernel holds a copy. With `keeps_weight` the weight
    stays in memory anyway, as a tied embedding does, and no packed kernel is chosen.
    """
    return (kernel or _choose(weight_OI, keeps_weight=keeps_weight))(weight_OI, bias_O)


def _choose(weight_OI: Tensor, *, keeps_weight: bool) -> Kernel:
    device, scale = weight_OI.device.type, None
    if device == "cpu" and weight_OI.is_floating_point():
        scale = half_scale(weight_OI)
    if own := operators.made("linear", device, weight_OI, in_halves=scale, keeps_weight=keeps_weight):
        return own  # type: ignore[no-any-return]
    if device != "cpu":
        return PlainLinear
    if scale and weight_OI.dtype is torch.float32 and can_halve():
        return partial(HalfLinear, scale=scale)
    return PackedLinear if not keeps_weight and can_pack(weight_OI.dtype) else PlainLinear
