"""Stands in for the kernel of few rows on CPUs, so that quantized experts are joined there as on a GPU.

Shapes: M tokens, P pairs of a token and one of the K experts that it chose, X experts, I inputs, O outputs of all.
"""

import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.models.quantization import weight_only


class Pairs(NamedTuple):
    """The pairs of a product, as `linear_gpu.choose` is asked for them."""

    experts_MK: Tensor
    num_experts: int


def join_on_cpu(patch: pytest.MonkeyPatch) -> list[int]:
    """Use the stand-in from now on; returns the number of tokens of each choice of experts, which then grows.

    Products are right in int8, and zeros in other formats.
    """
    num_tokens: list[int] = []

    def choose(experts_MK: Tensor, num_experts: int, *, value_bytes: int) -> Pairs:  # noqa: ARG001 - as the kernel's
        num_tokens.append(len(experts_MK))
        return Pairs(experts_MK, num_experts)

    patch.setitem(sys.modules, "llama_ssp.kernels.linear_gpu", SimpleNamespace(choose=choose))
    patch.setattr(weight_only, "find_few_rows", lambda *_: _product)
    patch.setattr(weight_only, "compiled_for", lambda *_: None)
    return num_tokens


def _product(
    x_MI: Tensor, weight_OI: Tensor, scales: Tensor, *_others: Tensor, bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None, chosen: Pairs | None = None,
) -> Tensor:  # fmt: skip
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
