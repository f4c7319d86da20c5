"""Linear layers with int8 weights and a scale per output, whose inputs are not quantized.

Each product reads half the bytes of fp16 weights. It uses an int8 kernel if there is a fast one for the number of rows;
otherwise it unpacks blocks of weights that stay in the processor's cache.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from llama_ssp.config.formats.int8_weight_only import FEW_ROWS
from llama_ssp.models.linear import Linear
from llama_ssp.models.triton_tools import attempt

_QUANTIZED_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Weights that are quantized at a time: few enough to need little memory, enough to keep a GPU busy."""
_UNPACKED_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""Weights that are unpacked at a time: few enough for a CPU's cache, enough to keep a GPU busy."""
_FEW_ROWS = {"cpu": 8, "cuda": FEW_ROWS}
"""Up to so many rows the int8 kernels are faster than unpacking."""
_LARGEST_BYTE = 127
_CPU_VECTOR = 16
"""Weights that torch's CPU operator reads at a time, even past the end of a row."""

ProductOfFewRows = Callable[..., Tensor]


class QuantizedForm(Linear):
    """Base class of quantized layers, which add the residual after the product."""


class Int8WeightOnlyLinear(QuantizedForm):
    """The format `int8_weight_only`."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI, self._scales_O = quantize_by_blocks(weight_OI, _to_bytes)
        self._bias_O = bias_O
        has_whole_vectors = weight_OI.shape[1] % _CPU_VECTOR == 0
        self._few_rows = _product_of_few_rows(weight_OI.device.type, weight_OI.dtype, has_whole_vectors)

    def __call__(self, x_MI: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sum(x_MI, None)

    def add(self, x_MI: Tensor, residual_MO: Tensor) -> Tensor:
        """See `Linear`."""
        return self._sum(x_MI, residual_MO)

    def _sum(self, x_MI: Tensor, residual_MO: Tensor | None) -> Tensor:
        """The product with bias and residual, which a GPU's kernel adds itself."""
        if self._few_rows is None or x_MI.shape[0] > _FEW_ROWS[x_MI.device.type]:
            y_MO = self._unpacked(x_MI)
        elif x_MI.is_cuda:
            return self._few_rows(x_MI, self._weight_OI, self._scales_O, bias_O=self._bias_O, residual_MO=residual_MO)
        else:
            y_MO = self._few_rows(x_MI, self._weight_OI, self._scales_O)
        if self._bias_O is not None:
            y_MO.add_(self._bias_O)
        return y_MO if residual_MO is None else y_MO.add_(residual_MO)

    def _unpacked(self, x_MI: Tensor) -> Tensor:
        """Unpack the weights of some outputs at a time, and multiply.

        In fp16 weights are scaled before the product, because unscaled sums would overflow; otherwise outputs after it.
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
    """Quantize a few rows at a time, which gives the same result as all at once."""
    num_rows = max(_QUANTIZED_ELEMENTS[weight_OI.device.type] // weight_OI.shape[1], 1)
    values, scales = zip(*map(quantize, weight_OI.split(num_rows)), strict=True)
    return torch.cat(values), torch.cat(scales)


def _to_bytes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and their scales (O,), which are rounded to the weight's dtype first."""
    numbers = torch.finfo(weight_OI.dtype)
    tiny = max(numbers.smallest_normal * numbers.eps, torch.finfo(torch.float32).smallest_normal)
    scales_O = (weight_OI.abs().amax(1).float() / _LARGEST_BYTE).to(weight_OI.dtype).clamp_(min=tiny)
    bytes_OI = (weight_OI / scales_O.float()[:, None]).round_().clamp_(-_LARGEST_BYTE, _LARGEST_BYTE)
    return bytes_OI.to(torch.int8), scales_O


@cache
def _product_of_few_rows(device: str, dtype: torch.dtype, has_whole_vectors: bool) -> ProductOfFewRows | None:
    """The int8 kernel for a few rows, if this build has a fast one.

    torch's operator is fast only on a CPU in bf16; unpacking is faster in fp32 and fp16. On a GPU each of its threads
    reads a row of the weights alone, which is slow.
    """
    if device == "cuda":
        return attempt(
            partial(_tried_kernel, dtype),
            instead="int8_weight_only unpacks its weights in every forward, which is slower than fp16",
        )
    if device == "cpu" and dtype is torch.bfloat16 and has_whole_vectors:
        ones = torch.ones(2, _CPU_VECTOR, dtype=dtype)
        with suppress(AttributeError, RuntimeError):
            product: ProductOfFewRows = torch.ops.aten._weight_int8pack_mm
            product(ones, ones.to(torch.int8), ones[:, 0])
            return product
    return None


def _tried_kernel(dtype: torch.dtype) -> ProductOfFewRows:
    """Triton's kernel, compiled and launched once, so that it is not compiled while a graph is captured."""
    from llama_ssp.models.quantization.int8_kernel import product_of_few_rows  # noqa: PLC0415 - CPU builds come without Triton

    x_MI, weight_OI = torch.ones(1, 256, dtype=dtype, device="cuda"), torch.ones(16, 256, device="cuda")
    product_of_few_rows(x_MI, weight_OI.to(torch.int8), x_MI[0, :16])
    return product_of_few_rows
