"""Linear layers whose weights alone are quantized, to 4 bits: integers with a scale and a zero per group, or E2M1.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block, G groups of 128, 64 or 32 inputs.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels.linear import Linear, added, compiled_for
from llama_ssp.models.quantization.weight_only import WeightOnlyLinear, few_rows_of, quantize_by_blocks
from llama_ssp.storage.formats import FP4_GROUP, FP4_NUMBERS, format_of
from llama_ssp.weights import byte_rows

_STEPS = 15


class _Int4WeightOnly(WeightOnlyLinear):
    """A layer whose operands are the bytes of codes (O, I / 2) and words (G, O), adjacent for neighbouring outputs."""

    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        codes_OI, words_GO, *scales = self._operands
        if into_CI.is_cuda and self._few_rows:
            of_outputs = [scales_O[outputs] for scales_O in scales]
            self._few_rows.unpack_codes(codes_OI[outputs], words_GO[:, outputs], into_CI, *of_outputs)
        else:
            self._write(codes_OI[outputs], words_GO[:, outputs].t(), outputs, into_CI)

    def _write(self, codes_CI: Tensor, words_CG: Tensor, outputs: slice, into_CI: Tensor) -> None:
        groups = into_CI.unflatten(1, (words_CG.shape[1], 2, -1))
        first, last = byte_rows.unpack_codes(codes_CI.unflatten(1, (words_CG.shape[1], -1)))
        groups[:, :, 0].copy_(first)
        groups[:, :, 1].copy_(last)
        words_CG11 = words_CG[..., None, None].contiguous()
        # Zeros are integers and scales in fp32, so that a weight is rounded once.
        groups.sub_(byte_rows.zeros_of(words_CG11)).mul_(byte_rows.scales_of(words_CG11))


class _Reordered(Linear):
    """A layer whose inputs are sorted by their groups, with a zero in each gap; see `byte_rows`."""

    def __init__(self, linear: Linear, order_I: Tensor) -> None:
        is_gap_I = order_I == byte_rows.GAP
        self._linear, self._has_gaps = linear, bool(is_gap_I.any())
        self._order_I = order_I.where(~is_gap_I, len(order_I) - is_gap_I.sum())

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        x_MI = functional.pad(x_MI, (0, 1)) if self._has_gaps else x_MI
        return self._linear(x_MI.index_select(1, self._order_I), residual_MO)


class _Beside(Linear):
    """Layers that read the same input, and whose outputs are concatenated."""

    def __init__(self, linears: list[Linear]) -> None:
        self._linears = linears

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        return added(torch.cat([linear(x_MI) for linear in self._linears], dim=1), residual_MO)


def int4_weight_only_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer in the format `int4_weight_only`.

    Weights that a checkpoint stores so are kept as they are, as the rows of bytes of `byte_rows`. Numbers are rounded
    to the nearest of 16 equal steps between the smallest and the largest weight of a group of inputs, or zero.
    """
    order_OI = None
    if weight_OI.dtype is torch.uint8:
        codes_OI, words_OG, order_OI = byte_rows.split_int4(weight_OI)
    else:
        group = format_of("int4_weight_only").packing.group_of(weight_OI.shape[1])
        codes_OI, words_OG = quantize_by_blocks(weight_OI, partial(_rounded, group=group))
    if order_OI is None:
        return _int4_linear(codes_OI, words_OG, bias_O)
    # Layers with one input, which are joined, nearly always have one order.
    is_other_O = (order_OI[1:] != order_OI[:-1]).any(1)
    edges = [0, *(1 + is_other_O.nonzero()[:, 0]).tolist(), len(order_OI)]
    linears: list[Linear] = [
        _Reordered(
            _int4_linear(codes_OI[rows], words_OG[rows], None if bias_O is None else bias_O[rows]), order_OI[rows.start]
        )
        for rows in map(slice, edges, edges[1:])
    ]
    return linears[0] if len(linears) == 1 else _Beside(linears)


def _int4_linear(codes_OI: Tensor, words_OG: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer from the bytes of codes (O, I / 2) and words (O, G)."""
    num_inputs, num_groups = 2 * codes_OI.shape[1], words_OG.shape[1]
    if compiled := compiled_for("int4_weight_only", torch.Size((len(codes_OI), num_inputs)), codes_OI.device):
        codes_OGI = torch.cat(byte_rows.unpack_codes(codes_OI.unflatten(1, (num_groups, -1))), dim=2)
        return compiled(codes_OGI.flatten(1), words_OG, bias_O)
    operands = codes_OI, words_OG.t().contiguous()
    return _Int4WeightOnly(operands, bias_O, few_rows_of("int4_weight_only", operands))


def _rounded(weight_CI: Tensor, *, group: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of the codes (C, I / 2) and the words (C, G) of the nearest weights in int4."""
    weight_CGI = weight_CI.float().unflatten(1, (-1, group))
    least_CG1 = weight_CGI.amin(2, keepdim=True).clamp_(max=0)
    range_CG1 = weight_CGI.amax(2, keepdim=True).clamp_(min=0).sub_(least_CG1)
    tiny = torch.finfo(torch.float32).smallest_normal
    scales_CG1 = byte_rows.scales_of((range_CG1 / _STEPS).clamp_(min=tiny).view(torch.int32))
    zeros_CG1 = (-least_CG1 / scales_CG1).round_().clamp_(0, _STEPS)
    codes_CGI = (weight_CGI / scales_CG1).round_().add_(zeros_CG1).clamp_(0, _STEPS).to(torch.uint8)
    return byte_rows.split(byte_rows.pack_int4(codes_CGI.flatten(1), scales_CG1.squeeze(2), zeros_CG1.squeeze(2)))


class _Fp4WeightOnly(_Int4WeightOnly):
    """A layer whose operands are bytes of codes (O, I / 2), scales (S, O) of groups, and scales (O,) of outputs."""

    def _write(self, codes_CI: Tensor, words_CG: Tensor, outputs: slice, into_CI: Tensor) -> None:
        numbers = torch.tensor(FP4_NUMBERS, device=into_CI.device)
        halves = byte_rows.unpack_codes(codes_CI.unflatten(1, (-1, FP4_GROUP // 2)))
        into_CI.copy_(numbers[torch.cat(halves, dim=2).flatten(1).int()])
        into_CI.unflatten(1, (words_CG.shape[1], -1)).mul_(words_CG[..., None].float())
        into_CI.mul_(self._operands[2][outputs, None])


def _fp4_linear(storage: str, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """Make a layer of floats of 4 bits from `byte_rows`."""
    codes_OI, scales_OS, factors_O = byte_rows.split_fp4(weight_OI)
    shape = torch.Size((len(codes_OI), 2 * codes_OI.shape[1]))
    if compiled := compiled_for(storage, shape, weight_OI.device):
        return compiled(weight_OI, factors_O, bias_O)
    scales_SO = scales_OS.t().contiguous().view(byte_rows.dtype_of_scales(format_of(storage).product))
    operands = codes_OI, scales_SO, factors_O
    return _Fp4WeightOnly(operands, bias_O, few_rows_of(storage, operands))


mxfp4_linear, nvfp4_linear = partial(_fp4_linear, "mxfp4"), partial(_fp4_linear, "nvfp4")
