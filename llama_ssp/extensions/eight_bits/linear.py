"""Linear layers whose weights alone are quantized, to bytes: int8 with a scale per output or group, E4M3 per group.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block, G groups of inputs.
"""

import torch
from torch import Tensor

from llama_ssp.kernels.linear import Linear, compiled_for
from llama_ssp.models.quantization.weight_only import WeightOnlyLinear, few_rows_of, quantize_by_blocks
from llama_ssp.storage.formats import FP8_GROUP
from llama_ssp.weights import byte_rows

_LARGEST_BYTE, _E4M3 = 127, torch.float8_e4m3fn


class _Int8WeightOnly(WeightOnlyLinear):
    """Scales the outputs after the product; in fp16 the weights before it, since unscaled sums would overflow."""

    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        bytes_OI, scales_O = self._operands
        if into_CI.dtype is torch.float16 and into_CI.is_cuda and self._few_rows:
            self._few_rows.unpack_bytes(bytes_OI[outputs], scales_O[outputs], into_CI)
            return
        into_CI.copy_(bytes_OI[outputs])
        if into_CI.dtype is torch.float16:
            into_CI.mul_(scales_O[outputs, None])

    def _unpacked(self, x_MI: Tensor) -> Tensor:
        y_MO = super()._unpacked(x_MI)
        return y_MO if y_MO.dtype is torch.float16 else y_MO.mul_(self._operands[1])


def int8_weight_only_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer in `int8_weight_only`, from numbers or from `byte_rows` whose words are the scales of outputs."""
    if weight_OI.dtype is torch.uint8:
        bytes_OI, words_O1 = byte_rows.split(weight_OI)
        operands = bytes_OI.view(torch.int8), words_O1.view(torch.float32).squeeze(1)
    else:
        operands = quantize_by_blocks(weight_OI, _to_bytes)
    if compiled := compiled_for("int8_weight_only", operands[0].shape, weight_OI.device):
        return compiled(*operands, bias_O)
    return _Int8WeightOnly(operands, bias_O, few_rows_of("int8_weight_only", operands))


def _to_bytes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and their scales (O,), in fp32."""
    tiny = torch.finfo(torch.float32).smallest_normal
    scales_O = (weight_OI.abs().amax(1).float() / _LARGEST_BYTE).clamp_(min=tiny)
    bytes_OI = (weight_OI / scales_O[:, None]).round_().clamp_(-_LARGEST_BYTE, _LARGEST_BYTE)
    return bytes_OI.to(torch.int8), scales_O


class _ScaledGroups(WeightOnlyLinear):
    """A layer whose operands are weights (O, I) in E4M3 or int8, and the scales (G, O) of their groups."""

    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        weight_OI, scales_GO = self._operands
        into_CI.copy_(weight_OI[outputs])
        into_CI.unflatten(1, (len(scales_GO), -1)).mul_(scales_GO[:, outputs].t()[..., None])


def int8_groups_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer in `int8_groups`, from `byte_rows` with scales of groups; no kernel reads it packed."""
    bytes_OI, words_OG = byte_rows.split(weight_OI)
    return _ScaledGroups((bytes_OI.view(torch.int8), words_OG.view(torch.float32).t().contiguous()), bias_O, None)


def fp8_weight_only_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer in `fp8_weight_only`, from numbers or `byte_rows` whose words are scales of groups of 128 inputs.

    Numbers are rounded to E4M3, with scales that turn the largest weight of a group into the largest number of E4M3.
    """
    if weight_OI.dtype is torch.uint8:
        bytes_OI, words_OG = byte_rows.split(weight_OI)
        scales_OG = words_OG.view(torch.float32)
    else:
        bytes_OI, scales_OG = quantize_by_blocks(weight_OI, _to_fp8)
    if compiled := compiled_for("fp8_weight_only", bytes_OI.shape, weight_OI.device):
        return compiled(bytes_OI, scales_OG, bias_O)
    operands = bytes_OI.view(_E4M3), scales_OG.t().contiguous()
    return _ScaledGroups(operands, bias_O, few_rows_of("fp8_weight_only", operands))


def _to_fp8(weight_CI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of the nearest numbers in E4M3 and the scales (C, G), in fp32."""
    weight_CGI = weight_CI.float().unflatten(1, (-1, FP8_GROUP))
    tiny = torch.finfo(torch.float32).smallest_normal
    scales_CG1 = (weight_CGI.abs().amax(2, keepdim=True) / torch.finfo(_E4M3).max).clamp_(min=tiny)
    return (weight_CGI / scales_CG1).to(_E4M3).flatten(1).view(torch.uint8), scales_CG1.squeeze(2)
