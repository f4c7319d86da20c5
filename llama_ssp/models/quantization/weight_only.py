"""Linear layers with a byte a weight and a scale per output, whose inputs keep their number format.

Each product reads half of the bytes that fp16 weights have: a kernel that takes bytes where there is a fast one for the
rows at hand, else blocks of weights that are unpacked where they stay in the cache.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_QUANTIZED_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Weights that are quantized at a time: what that takes beside them stays small, and a GPU is kept busy."""
_UNPACKED_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Weights that are unpacked at a time: they stay in a CPU's cache, and keep a GPU busy."""
_FEW_ROWS = {"cpu": 8, "cuda": 16}
"""Up to here products with bytes are faster than unpacking them; on a GPU these are the rows of a tile."""
_LARGEST_BYTE = 127
_CPU_VECTOR = 16
"""Weights that torch's operator for CPUs reads at a time, also behind the last one of a row."""

ProductOfFewRows = Callable[[Tensor, Tensor, Tensor], Tensor]


class QuantizedForm(ABC):
    """What all forms share: the residual goes on top of a product of its own."""

    @abstractmethod
    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x_MI).add_(residual_MO)


class Int8WeightOnlyLinear(QuantizedForm):
    """Our own form.

    Args:
        weight_OI: in its own number format.
        bias_O: or None.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._scales_O = quantize_by_blocks(weight_OI, _to_bytes)
        self._bias_O = bias_O
        has_whole_vectors = weight_OI.shape[1] % _CPU_VECTOR == 0
        self._few_rows = _product_of_few_rows(weight_OI.device.type, weight_OI.dtype, has_whole_vectors)

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        if self._few_rows and x_MI.shape[0] <= _FEW_ROWS[x_MI.device.type]:
            y_MO = self._few_rows(x_MI, self._weight_OI, self._scales_O)
        else:
            y_MO = self._unpacked(x_MI)
        return y_MO if self._bias_O is None else y_MO.add_(self._bias_O)

    def _unpacked(self, x_MI: Tensor) -> Tensor:
        """Unpack the weights of some outputs, multiply them, go on with the next.

        In fp16, whose range sums of inputs times bytes would leave, weights are scaled before, elsewhere outputs after.
        """
        num_outputs, num_inputs = self._weight_OI.shape
        num_rows = min(max(_UNPACKED_ELEMENTS[x_MI.device.type] // num_inputs, 1), num_outputs)
        unpacked_CI = x_MI.new_empty(num_rows, num_inputs)
        y_MO = x_MI.new_empty(x_MI.shape[0], num_outputs)
        blocks = (self._weight_OI.split(num_rows), self._scales_O.split(num_rows), y_MO.split(num_rows, dim=1))
        for bytes_CI, scales_C, y_MC in zip(*blocks, strict=True):
            weight_CI = unpacked_CI[: len(bytes_CI)].copy_(bytes_CI)
            if x_MI.dtype is torch.float16:
                weight_CI.mul_(scales_C[:, None])
            y_MC.copy_(torch.mm(x_MI, weight_CI.t()))
        return y_MO if x_MI.dtype is torch.float16 else y_MO.mul_(self._scales_O)


def quantize_by_blocks(weight_OI: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Quantize some rows after the other, which gives what all at once would give."""
    num_rows = max(_QUANTIZED_ELEMENTS[weight_OI.device.type] // weight_OI.shape[1], 1)
    values, scales = zip(*map(quantize, weight_OI.split(num_rows)), strict=True)
    return torch.cat(values), torch.cat(scales)


def _to_bytes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes, and the scales (O,) that they are multiplied by, rounded to the weight's number format beforehand."""
    numbers = torch.finfo(weight_OI.dtype)
    tiny = max(numbers.smallest_normal * numbers.eps, torch.finfo(torch.float32).smallest_normal)
    scales_O = (weight_OI.abs().amax(1).float() / _LARGEST_BYTE).to(weight_OI.dtype).clamp_(min=tiny)
    bytes_OI = (weight_OI / scales_O.float()[:, None]).round_().clamp_(-_LARGEST_BYTE, _LARGEST_BYTE)
    return bytes_OI.to(torch.int8), scales_O


@cache
def _product_of_few_rows(device: str, dtype: torch.dtype, has_whole_vectors: bool) -> ProductOfFewRows | None:
    """What multiplies a few rows by bytes and reads no more than those, where this build has it.

    torch's own operator is fast on a CPU in bf16 alone, where fp32 and fp16 are better unpacked; on a GPU each of its
    threads walks along a row of the weights by itself.
    """
    if device == "cuda" and find_spec("triton"):
        from llama_ssp.models.quantization.int8_kernel import product_of_few_rows  # noqa: PLC0415 - CPU builds come without Triton

        return product_of_few_rows
    if device == "cpu" and dtype is torch.bfloat16 and has_whole_vectors:
        ones = torch.ones(2, _CPU_VECTOR, dtype=dtype)
        with suppress(AttributeError, RuntimeError):
            product: ProductOfFewRows = torch.ops.aten._weight_int8pack_mm
            product(ones, ones.to(torch.int8), ones[:, 0])
            return product
    return None
