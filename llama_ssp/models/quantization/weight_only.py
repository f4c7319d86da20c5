"""Linear layers whose weights alone are quantized: int8 with a scale per output, others with one per group.

Each product reads half the bytes of fp16 weights, or less. It uses a kernel for packed weights if there is a fast one
for the number of rows; otherwise it unpacks blocks of weights that stay in the processor's cache.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block, G groups of 128, 64 or 32 inputs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp import operators
from llama_ssp.kernels.linear import FewRows, Linear, added, compiled_for
from llama_ssp.storage.formats import FEW_ROWS, FP4_GROUP, FP4_NUMBERS, FP8_GROUP, UNPACKED_WEIGHTS, format_of
from llama_ssp.weights import byte_rows

_QUANTIZED_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Weights that are quantized at a time: few enough to need little memory, enough to keep a GPU busy."""
_UNPACKED_ELEMENTS = {"cpu": 2**20, "cuda": UNPACKED_WEIGHTS}
"""Weights that are unpacked at a time: few enough for a CPU's cache; on a GPU each step is a few kernels more."""
_LARGEST_BYTE, _STEPS, _E4M3 = 127, 15, torch.float8_e4m3fn


class _WeightOnlyLinear(Linear):
    """Base class of forms whose inputs are not quantized.

    `operands` are the packed weights with their outputs first, and all their scales, as the kernel takes them;
    `few_rows` has the kernel for up to `FEW_ROWS` rows of a GPU.
    """

    def __init__(self, operands: tuple[Tensor, ...], bias_O: Tensor | None, few_rows: FewRows | None) -> None:
        self._operands, self._bias_O, self._few_rows = operands, bias_O, few_rows
        byte_weights = 2 if operands[0].dtype is torch.uint8 else 1
        self._num_inputs = byte_weights * operands[0].shape[1]  # a trace keeps it as a constant

    @abstractmethod
    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        """Write the weights of some outputs, in the dtype of the inputs, into given memory."""

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`; a GPU's kernel adds bias and residual itself."""
        if self._few_rows and x_MI.shape[0] <= FEW_ROWS:
            product = self._few_rows.product_of_few_rows
            return product(x_MI, *self._operands, bias_O=self._bias_O, residual_MO=residual_MO)
        return added(self._unpacked(x_MI), self._bias_O, residual_MO)

    def _unpacked(self, x_MI: Tensor) -> Tensor:
        """Unpack the weights of some outputs at a time, and multiply."""
        num_outputs = len(self._operands[0])
        num_rows = min(max(_UNPACKED_ELEMENTS[x_MI.device.type] // self._num_inputs, 1), num_outputs)
        unpacked_CI = x_MI.new_empty(num_rows, self._num_inputs)
        y_MO = x_MI.new_empty(x_MI.shape[0], num_outputs)
        for number, y_MC in enumerate(y_MO.split(num_rows, dim=1)):
            weight_CI = unpacked_CI[: y_MC.shape[1]]
            self._unpack(slice(number * num_rows, number * num_rows + len(weight_CI)), weight_CI)
            if x_MI.is_cuda:
                torch.mm(x_MI, weight_CI.t(), out=y_MC)
            else:
                y_MC.copy_(torch.mm(x_MI, weight_CI.t()))
        return y_MO


class _Int8WeightOnly(_WeightOnlyLinear):
    """In fp16 weights are scaled before the product, since unscaled sums would overflow; otherwise outputs after it."""

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
    """A layer in the format `int8_weight_only`, of numbers or of `byte_rows` whose word is the scale of an output."""
    if weight_OI.dtype is torch.uint8:
        bytes_OI, words_O1 = byte_rows.split(weight_OI)
        operands = bytes_OI.view(torch.int8), words_O1.view(torch.float32).squeeze(1)
    else:
        operands = quantize_by_blocks(weight_OI, _to_bytes)
    if compiled := compiled_for("int8_weight_only", operands[0].shape, weight_OI.device):
        return compiled(*operands, bias_O)
    return _Int8WeightOnly(operands, bias_O, _few_rows_of("int8_weight_only", operands))


def _few_rows_of(storage: str, operands: Sequence[Tensor]) -> FewRows | None:
    """The device's product of a few rows and weights in a format; see `operators`."""
    found: FewRows | None = operators.made("few_rows", operands[0].device.type, storage, operands)
    return found


def quantize_by_blocks(weight_OI: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Quantize a few rows at a time, which gives the same result as all at once."""
    num_rows = max(_QUANTIZED_ELEMENTS[weight_OI.device.type] // weight_OI.shape[1], 1)
    values, scales = zip(*map(quantize, weight_OI.split(num_rows)), strict=True)
    return torch.cat(values), torch.cat(scales)


def _to_bytes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 values and their scales (O,), in fp32."""
    tiny = torch.finfo(torch.float32).smallest_normal
    scales_O = (weight_OI.abs().amax(1).float() / _LARGEST_BYTE).clamp_(min=tiny)
    bytes_OI = (weight_OI / scales_O[:, None]).round_().clamp_(-_LARGEST_BYTE, _LARGEST_BYTE)
    return bytes_OI.to(torch.int8), scales_O


class _Int4WeightOnly(_WeightOnlyLinear):
    """Its operands are the bytes of codes (O, I / 2) and the words (G, O): the kernel reads neighbours' words."""

    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        codes_OI, words_GO, *scales = self._operands
        if into_CI.is_cuda and self._few_rows:
            of_outputs = [scales_O[outputs] for scales_O in scales]
            self._few_rows.unpack_codes(codes_OI[outputs], words_GO[:, outputs], into_CI, *of_outputs)
        else:
            self._write(codes_OI[outputs], words_GO[:, outputs].t(), outputs, into_CI)

    def _write(self, codes_CI: Tensor, words_CG: Tensor, outputs: slice, into_CI: Tensor) -> None:  # noqa: ARG002
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


class JoinedExperts:
    """The weights of experts one after the other, whose linear layers keep views of them.

    It maps inputs (M, I) and pairs of tokens and experts, as `choose` finds them, to their products. An update of the
    weights finds all of its tensors, and no closure holds any (see `workspaces.InPlace`).
    """

    def __init__(self, experts: Sequence[_WeightOnlyLinear], few_rows: FewRows) -> None:
        self._few_rows = few_rows
        columns = zip(*(expert._operands for expert in experts), strict=True)
        # Numbers of 8 bits are concatenated as bytes.
        self._operands = operands = tuple(
            torch.cat(
                [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts], dim=-1 if number else 0
            ).view(parts[0].dtype)
            for number, parts in enumerate(columns)
        )
        biases = [expert._bias_O for expert in experts if expert._bias_O is not None]
        self._bias_O = torch.cat(biases) if biases else None
        num_outputs = len(operands[0]) // len(experts)
        for number, expert in enumerate(experts):
            start = number * num_outputs
            expert._operands = operands[0].narrow(0, start, num_outputs), *(
                scales.narrow(-1, start, num_outputs) for scales in operands[1:]
            )  # fmt: skip
            if self._bias_O is not None:
                expert._bias_O = self._bias_O.narrow(0, start, num_outputs)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._operands[0].device

    def choose(self, experts_MK: Tensor, num_experts: int, *, value_bytes: int) -> object:
        """The pairs of tokens and the experts that they chose, for products of numbers of `value_bytes`."""
        return self._few_rows.choose(experts_MK, num_experts, value_bytes=value_bytes)

    def __call__(self, x_MI: Tensor, chosen: object) -> Tensor:
        """Compute the product of each pair."""
        return self._few_rows.product_of_few_rows(x_MI, *self._operands, bias_O=self._bias_O, chosen=chosen)


def join_experts(linears: Sequence[Linear]) -> JoinedExperts | None:
    """Join the weights of experts for products of few pairs on a GPU; None where a layer has no such kernel."""
    experts = [linear for linear in linears if isinstance(linear, _WeightOnlyLinear)]
    if len(experts) < len(linears) or not (few_rows := experts[0]._few_rows):
        return None
    joined = JoinedExperts(experts, few_rows)
    how = {"num_experts": len(experts), "num_inputs": experts[0]._num_inputs}
    found: JoinedExperts | None = operators.made("joined_experts", joined.device.type, joined, **how)
    return found


class _Beside(Linear):
    """Layers with one input, whose outputs follow each other."""

    def __init__(self, linears: list[Linear]) -> None:
        self._linears = linears

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`."""
        return added(torch.cat([linear(x_MI) for linear in self._linears], dim=1), residual_MO)


def int4_weight_only_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """A layer in the format `int4_weight_only`.

    Checkpoints that hold such weights are read as they are, as the rows of bytes of `byte_rows`. Numbers are rounded to
    the nearest of 16 equal steps between the smallest and the largest weight of a group of inputs, or zero.
    """
    order_OI = None
    if weight_OI.dtype is torch.uint8:
        codes_OI, words_OG, order_OI = byte_rows.split_int4(weight_OI)
    else:
        group = format_of("int4_weight_only").group_of(weight_OI.shape[1])
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
    """A layer of the bytes of codes (O, I / 2) and words (O, G)."""
    num_inputs, num_groups = 2 * codes_OI.shape[1], words_OG.shape[1]
    if compiled := compiled_for("int4_weight_only", torch.Size((len(codes_OI), num_inputs)), codes_OI.device):
        codes_OGI = torch.cat(byte_rows.unpack_codes(codes_OI.unflatten(1, (num_groups, -1))), dim=2)
        return compiled(codes_OGI.flatten(1), words_OG, bias_O)
    operands = codes_OI, words_OG.t().contiguous()
    return _Int4WeightOnly(operands, bias_O, _few_rows_of("int4_weight_only", operands))


class _ScaledGroups(_WeightOnlyLinear):
    """Its operands are the weights (O, I) in E4M3 or int8 and the scales (G, O) of their groups."""

    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        weight_OI, scales_GO = self._operands
        into_CI.copy_(weight_OI[outputs])
        into_CI.unflatten(1, (len(scales_GO), -1)).mul_(scales_GO[:, outputs].t()[..., None])


def int8_groups_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """A layer in the format `int8_groups`, of `byte_rows` with scales of groups, which no kernel reads packed."""
    bytes_OI, words_OG = byte_rows.split(weight_OI)
    return _ScaledGroups((bytes_OI.view(torch.int8), words_OG.view(torch.float32).t().contiguous()), bias_O, None)


def fp8_weight_only_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """A layer in the format `fp8_weight_only`, of `byte_rows` whose words are the scales of groups of 128 inputs.

    Numbers are rounded to E4M3, whose largest number stands for the largest weight of a group.
    """
    if weight_OI.dtype is torch.uint8:
        bytes_OI, words_OG = byte_rows.split(weight_OI)
        scales_OG = words_OG.view(torch.float32)
    else:
        bytes_OI, scales_OG = quantize_by_blocks(weight_OI, _to_fp8)
    if compiled := compiled_for("fp8_weight_only", bytes_OI.shape, weight_OI.device):
        return compiled(bytes_OI, scales_OG, bias_O)
    operands = bytes_OI.view(_E4M3), scales_OG.t().contiguous()
    return _ScaledGroups(operands, bias_O, _few_rows_of("fp8_weight_only", operands))


def _to_fp8(weight_CI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of the nearest numbers in E4M3 and the scales (C, G), in fp32."""
    weight_CGI = weight_CI.float().unflatten(1, (-1, FP8_GROUP))
    tiny = torch.finfo(torch.float32).smallest_normal
    scales_CG1 = (weight_CGI.abs().amax(2, keepdim=True) / torch.finfo(_E4M3).max).clamp_(min=tiny)
    return (weight_CGI / scales_CG1).to(_E4M3).flatten(1).view(torch.uint8), scales_CG1.squeeze(2)


class _Fp4WeightOnly(_Int4WeightOnly):
    """Its operands are the bytes of codes (O, I / 2), the scales (S, O) of their groups, and of the outputs (O,)."""

    def _write(self, codes_CI: Tensor, words_CG: Tensor, outputs: slice, into_CI: Tensor) -> None:
        numbers = torch.tensor(FP4_NUMBERS, device=into_CI.device)
        halves = byte_rows.unpack_codes(codes_CI.unflatten(1, (-1, FP4_GROUP // 2)))
        into_CI.copy_(numbers[torch.cat(halves, dim=2).flatten(1).int()])
        into_CI.unflatten(1, (words_CG.shape[1], -1)).mul_(words_CG[..., None].float())
        into_CI.mul_(self._operands[2][outputs, None])


def _fp4_linear(storage: str, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    """A layer of floats of 4 bits, of `byte_rows`."""
    codes_OI, scales_OS, factors_O = byte_rows.split_fp4(weight_OI)
    shape = torch.Size((len(codes_OI), 2 * codes_OI.shape[1]))
    if compiled := compiled_for(storage, shape, weight_OI.device):
        return compiled(weight_OI, factors_O, bias_O)
    scales_SO = scales_OS.t().contiguous().view(byte_rows.dtype_of_scales(format_of(storage).product))
    operands = codes_OI, scales_SO, factors_O
    return _Fp4WeightOnly(operands, bias_O, _few_rows_of(storage, operands))


mxfp4_linear, nvfp4_linear = partial(_fp4_linear, "mxfp4"), partial(_fp4_linear, "nvfp4")


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
