"""Stands in for the kernel of few rows on CPUs, so that quantized experts are joined there as on a GPU.

Shapes: M tokens, P pairs of a token and one of the K experts that it chose, X experts, I inputs, O outputs of all.
"""

import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.registry.operators import OPERATORS, DeviceOperator

_num_tokens: list[int] = []


class Pairs(NamedTuple):
    """The pairs of a product, as `choose` is asked for them."""

    experts_MK: Tensor
    num_experts: int


def join_on_cpu(patch: pytest.MonkeyPatch) -> list[int]:
    """Use the stand-in from now on; returns the number of tokens of each choice of experts, which then grows.

    Products are right in int8, and zeros in other formats.
    """
    _num_tokens.clear()
    made_by = {"few_rows": "find_few_rows", "joined_experts": "tried_experts", "packed_linear": "no_product"}
    for operation, make in made_by.items():
        record = DeviceOperator(operation=operation, device="cpu", make=f"{__name__}:{make}")
        patch.setitem(OPERATORS.records, record.name, record)
    return _num_tokens


def no_product(*_case: object) -> None:
    """None: compiled products take no part."""


def find_few_rows(*_case: object) -> ModuleType:
    """This module, as a `FewRows`."""
    return sys.modules[__name__]


def tried_experts(joined: Any, *, num_experts: int, num_inputs: int) -> Any:
    """The experts, after a first product."""
    joined(torch.ones(1, num_inputs), joined.choose(torch.zeros(1, 1, dtype=torch.int64), num_experts, value_bytes=4))
    return joined


def choose(experts_MK: Tensor, num_experts: int, *, value_bytes: int) -> Pairs:
    """The pairs."""
    _num_tokens.append(len(experts_MK))
    return Pairs(experts_MK, num_experts)


def product_of_few_rows(
    x_MI: Tensor,
    weight_OI: Tensor,
    scales: Tensor,
    *_others: Tensor,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    chosen: Pairs | None = None,
) -> Tensor:
    """The product of rows, or of chosen pairs."""
    numbers_OI = torch.zeros(len(weight_OI), x_MI.shape[1])
    if weight_OI.dtype is torch.int8:
        numbers_OI = weight_OI.float() * scales[:, None]
    x_MI = x_MI.float()
    if chosen is None:
        y_MO = functional.linear(x_MI, numbers_OI, bias_O)
        return y_MO if residual_MO is None else y_MO + residual_MO
    experts_P = chosen.experts_MK.flatten()
    x_PI = x_MI.repeat_interleave(len(experts_P) // len(x_MI), 0)
    y_PXO = functional.linear(x_PI, numbers_OI, bias_O).unflatten(1, (chosen.num_experts, -1))
    with_others = functional.pad(y_PXO, (0, 0, 0, 1))  # 0 of experts of other ranks
    return with_others[torch.arange(len(experts_P)), experts_P]
