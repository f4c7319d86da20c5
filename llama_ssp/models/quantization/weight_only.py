"""Linear layers whose weights alone are quantized: int8 with a scale per output, others with one per group.

Each product reads half the bytes of fp16 weights, or less. It uses a kernel for packed weights if there is a fast one
for the number of rows; otherwise it unpacks blocks of weights that stay in the processor's cache.

Shapes: M rows (tokens), I inputs, O outputs, C outputs of one block, G groups of 128, 64 or 32 inputs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llama_ssp.kernels.linear import FewRows, Linear, added
from llama_ssp.registry import operators
from llama_ssp.storage.formats import FEW_ROWS, UNPACKED_WEIGHTS

_QUANTIZED_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Weights that are quantized at a time: few enough to need little memory, enough to keep a GPU busy."""
_UNPACKED_ELEMENTS = {"cpu": 2**20, "cuda": UNPACKED_WEIGHTS}
"""Weights that are unpacked at a time: few enough for a CPU's cache; on a GPU each step is a few kernels more."""


class WeightOnlyLinear(Linear):
    """Base class of kernels of linear layers whose inputs are not quantized.

    `operands` are the packed weights with their outputs first, and all their scales, as the kernel takes them;
    `few_rows` has a GPU's kernel for up to `most_rows` rows.
    """

    most_rows = FEW_ROWS

    def __init__(self, operands: tuple[Tensor, ...], bias_O: Tensor | None, few_rows: FewRows | None) -> None:
        self._operands, self._bias_O, self._few_rows = operands, bias_O, few_rows
        byte_weights = 2 if operands[0].dtype is torch.uint8 else 1
        self._num_inputs = byte_weights * operands[0].shape[1]  # a trace keeps it as a constant

    @property
    def has_few_rows(self) -> bool:
        """Whether there is a kernel for a few rows."""
        return self._few_rows is not None

    @abstractmethod
    def _unpack(self, outputs: slice, into_CI: Tensor) -> None:
        """Write the weights of some outputs, in the dtype of the inputs, into given memory."""

    def __call__(self, x_MI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
        """See `Linear`; a GPU's kernel adds bias and residual itself."""
        if self._few_rows and x_MI.shape[0] <= self.most_rows:
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


def few_rows_of(storage: str, operands: Sequence[Tensor]) -> FewRows | None:
    """The device's product of a few rows and weights in a format; see `operators`."""
    found: FewRows | None = operators.made("few_rows", operands[0].device.type, storage, operands)
    return found


def quantize_by_blocks(weight_OI: Tensor, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Quantize a few rows at a time, which gives the same result as all at once."""
    num_rows = max(_QUANTIZED_ELEMENTS[weight_OI.device.type] // weight_OI.shape[1], 1)
    values, scales = zip(*map(quantize, weight_OI.split(num_rows)), strict=True)
    return torch.cat(values), torch.cat(scales)


class JoinedExperts:
    """The weights of experts in one piece of memory; the linear layers of the experts are views of it.

    Called with inputs (M, I) and pairs of tokens and experts from `choose`, it returns their products. The weights are
    attributes, not captured in a closure, so that updates find all tensors (see `workspaces.InPlace`).
    """

    def __init__(self, experts: Sequence[WeightOnlyLinear], few_rows: FewRows) -> None:
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
            expert._operands = (
                operands[0].narrow(0, start, num_outputs),
                *(scales.narrow(-1, start, num_outputs) for scales in operands[1:]),
            )
            if self._bias_O is not None:
                expert._bias_O = self._bias_O.narrow(0, start, num_outputs)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._operands[0].device

    def choose(self, experts_MK: Tensor, num_experts: int, *, value_bytes: int) -> object:
        """Make the pairs of tokens and the experts that they chose, for products of numbers of `value_bytes` bytes."""
        return self._few_rows.choose(experts_MK, num_experts, value_bytes=value_bytes)

    def __call__(self, x_MI: Tensor, chosen: object) -> Tensor:
        """Compute the product of each pair."""
        return self._few_rows.product_of_few_rows(x_MI, *self._operands, bias_O=self._bias_O, chosen=chosen)


def join_experts(linears: Sequence[Linear]) -> JoinedExperts | None:
    """Join the weights of experts for a GPU's products of few pairs; None if a layer has no such kernel."""
    experts = [linear for linear in linears if isinstance(linear, WeightOnlyLinear)]
    if len(experts) < len(linears) or not (few_rows := experts[0]._few_rows):
        return None
    joined = JoinedExperts(experts, few_rows)
    how = {"num_experts": len(experts), "num_inputs": experts[0]._num_inputs}
    found: JoinedExperts | None = operators.made("joined_experts", joined.device.type, joined, **how)
    return found
