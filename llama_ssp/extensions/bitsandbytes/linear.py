"""Linear layers of bitsandbytes.

    int8       int8 inputs and weights, integer sums, a scale per row of each
    nf4, fp4   weights only, 4 bits each, a scale per 64 weights

Shapes: M rows (tokens), I inputs, O outputs.
"""

import logging
import sys
from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor

from llama_ssp.extensions.bitsandbytes.records import NF4_GROUP
from llama_ssp.kernels.linear import Linear, added, compiled_for
from llama_ssp.models.quantization.weight_only import quantize_by_blocks
from llama_ssp.weights import byte_rows

_STEPS = 127


class _Int8Linear(Linear):
    """LLM.int8() of bitsandbytes."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._quantize = bitsandbytes().functional.int8_vectorwise_quant
        self._weight_OI, self._scales_O = quantize_by_blocks(weight_OI, lambda block: self._quantize(block.half())[:2])
        self._bias_O = bias_O

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        x_int8_MI, x_scales_M, _ = self._quantize(x_MI.half(), threshold=0.0)
        y_MO: Tensor = torch.ops.bitsandbytes.int8_scaled_mm(
            x_int8_MI, self._weight_OI, x_scales_M, self._scales_O, bias=self._bias_O, dtype=x_MI.dtype
        )
        return added(y_MO, residual_MO)


def int8_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer of LLM.int8() that quantizes all inputs; on CPUs a compiled kernel computes its integer products.

    Source: Dettmers et al. 2022, arXiv:2208.07339.
    """
    if compiled := compiled_for("int8", weight_OI.shape, weight_OI.device):
        return compiled(*quantize_by_blocks(weight_OI, _to_steps), bias_O)
    return _Int8Linear(weight_OI, bias_O)


def _to_steps(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output's weights to 127 steps on each side of zero; returns them and the steps' sizes, in fp32."""
    largest_O = weight_OI.float().abs().amax(1).clamp_(min=torch.finfo(torch.float32).smallest_normal)
    steps_OI = (weight_OI * (_STEPS / largest_O)[:, None]).round_()
    return steps_OI.to(torch.int8), largest_O / _STEPS


class Nf4Linear(Linear):
    """A layer in 4-bit NormalFloat of bitsandbytes, with scales in fp32.

    It is made from numbers, or from `byte_rows` that have codes and scales.

    Source: Dettmers et al. 2023, arXiv:2305.14314.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, kind: str = "nf4") -> None:
        library = bitsandbytes()
        pack = partial(
            library.functional.quantize_4bit, blocksize=NF4_GROUP, compress_statistics=False, quant_type=kind
        )

        def packed(block: Tensor) -> tuple[Tensor, Tensor]:
            values, state = pack(block)
            return values, state.absmax

        shape = weight_OI.shape
        if weight_OI.dtype is torch.uint8:
            bytes_OI, words_OG = byte_rows.split(weight_OI)
            shape = torch.Size((len(bytes_OI), 2 * bytes_OI.shape[1]))
            self._weight, scales = bytes_OI.view(-1, 1), words_OG.view(torch.float32).flatten()
        else:
            self._weight, scales = quantize_by_blocks(weight_OI, packed)
        self._state = library.functional.QuantState(
            absmax=scales, shape=shape, code=_code_of(kind, weight_OI.device), blocksize=NF4_GROUP, quant_type=kind
        )
        self._product = library.matmul_4bit
        self._bias_O = bias_O

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        self._state.dtype = x_MI.dtype  # the library finds that of the product here alone
        return added(self._product(x_MI, self._weight, quant_state=self._state, bias=self._bias_O), residual_MO)


fp4_linear = partial(Nf4Linear, kind="fp4")


@cache
def _code_of(kind: str, device: torch.device) -> Tensor:
    """Return the sixteen values of a format, in one tensor for all layers."""
    code: Tensor = bitsandbytes().functional.get_4bit_type(kind, device=device)
    return code


@cache
def bitsandbytes() -> ModuleType:
    """Import the package, without letting it download kernels from the hub and run them."""
    log = logging.getLogger("bitsandbytes")
    level, hub = log.level, sys.modules.get("kernels")
    log.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]  # so that importing it fails
    try:
        import bitsandbytes

        return bitsandbytes
    finally:
        log.setLevel(level)
        if hub is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = hub
