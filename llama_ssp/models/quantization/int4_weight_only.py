"""Linear layers with int4 weights, a scale and a zero per 128 inputs, whose inputs are not quantized.

Checkpoints that hold such weights are read as they are. Others are rounded to the nearest of 16 equal steps between the
smallest and the largest weight of a group, or zero.

Shapes: O outputs, I inputs, C outputs of one block, G groups of 128 inputs.
"""

from functools import cache

import torch
from torch import Tensor

from llama_ssp.config.formats import INT4_GROUP as GROUP
from llama_ssp.distributed.comms import is_recording
from llama_ssp.kernels.linear import NIBBLES, NativeLinear, fits
from llama_ssp.models.quantization.weight_only import (
    ProductOfFewRows,
    WeightOnlyLinear,
    kernel_of_gpus,
    quantize_by_blocks,
)
from llama_ssp.weights import int4_rows

_STEPS = 15


class Int4WeightOnlyLinear(WeightOnlyLinear):
    """The format `int4_weight_only`.

    Args:
        weight_OI: numbers, or the rows of bytes of `int4_rows`.
        bias_O: None for no bias.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        is_packed = weight_OI.dtype is torch.uint8
        codes_OI, words_OG = int4_rows.split(weight_OI) if is_packed else quantize_by_blocks(weight_OI, _rounded)
        num_inputs = 2 * codes_OI.shape[1]
        if weight_OI.device.type == "cpu" and fits(NIBBLES, torch.Size((len(codes_OI), num_inputs))):
            self.native = NativeLinear(NIBBLES, _one_by_one(codes_OI), words_OG, bias_O)
            return
        # The kernel reads the words of neighbouring outputs together.
        operands = codes_OI, words_OG.t().contiguous()
        super().__init__(operands, num_inputs, bias_O, _product_of_few_rows(weight_OI.device.type))

    def unpack(self, outputs: slice, into_CI: Tensor) -> None:
        """See `WeightOnlyLinear`."""
        codes_OI, words_GO = self._operands
        if into_CI.is_cuda and self._few_rows:
            from llama_ssp.models.quantization.few_rows_kernel import unpack_codes  # noqa: PLC0415 - imports Triton

            unpack_codes(codes_OI[outputs], words_GO[:, outputs], into_CI)
            return
        groups = into_CI.unflatten(1, (-1, 2, GROUP // 2))
        first, last = int4_rows.unpack_codes(codes_OI[outputs].unflatten(1, (-1, GROUP // 2)))
        groups[:, :, 0].copy_(first)
        groups[:, :, 1].copy_(last)
        words_CG11 = words_GO[:, outputs].t()[..., None, None].contiguous()
        # A trace cannot hold the change from bits to numbers, but it can hold an operator.
        scales_of = torch.ops.llama_ssp.int4_scales if is_recording() else int4_rows.scales_of
        # Zeros are integers and scales in fp32, so that a weight is rounded once.
        groups.sub_(int4_rows.zeros_of(words_CG11)).mul_(scales_of(words_CG11))


def _one_by_one(codes_OI: Tensor) -> Tensor:
    """The codes of bytes of two, in the order of inputs."""
    return torch.cat(int4_rows.unpack_codes(codes_OI.unflatten(1, (-1, GROUP // 2))), dim=2).flatten(1)


_library = torch.library.Library("llama_ssp", "FRAGMENT")
_library.define("int4_scales(Tensor words) -> Tensor")
_library.impl("int4_scales", int4_rows.scales_of, "CPU")


def _rounded(weight_CI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of the codes (C, I / 2) and the words (C, G) of the nearest weights in int4."""
    weight_CGI = weight_CI.float().unflatten(1, (-1, GROUP))
    least_CG1 = weight_CGI.amin(2, keepdim=True).clamp_(max=0)
    range_CG1 = weight_CGI.amax(2, keepdim=True).clamp_(min=0).sub_(least_CG1)
    tiny = torch.finfo(torch.float32).smallest_normal
    scales_CG1 = int4_rows.scales_of((range_CG1 / _STEPS).clamp_(min=tiny).view(torch.int32))
    zeros_CG1 = (-least_CG1 / scales_CG1).round_().clamp_(0, _STEPS)
    codes_CGI = (weight_CGI / scales_CG1).round_().add_(zeros_CG1).clamp_(0, _STEPS).to(torch.uint8)
    return int4_rows.split(int4_rows.pack(codes_CGI.flatten(1), scales_CG1.squeeze(2), zeros_CG1.squeeze(2)))


@cache
def _product_of_few_rows(device: str) -> ProductOfFewRows | None:
    """The kernel for a few rows, if this machine has one; a CPU unpacks."""
    if device != "cuda":
        return None
    codes_OI, words_GO = torch.zeros(16, 128, dtype=torch.uint8), torch.zeros(2, 16, dtype=torch.int32)
    return kernel_of_gpus("int4_weight_only", (codes_OI, words_GO))
