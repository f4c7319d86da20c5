"""Parts of a layer as references and kernels take them: its heads, the sequences of a forward, and the norm.

Shapes: H query heads, N key-value heads, D head dim, C sequences, E width of what is normalized.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Heads(NamedTuple):
    """The heads of a layer on this rank: H, N, D, and what scores are multiplied by."""

    num: int
    num_kv: int
    dim: int
    scale: float


class Sequences(NamedTuple):
    """Where the sequences of a forward lie; tensors are int32 on the device.

    Attributes:
        first_query_C1: the running sum of their queries.
        first_slot_C1: the slots where their rows begin, and one more number, which has no effect.
        used_C: their slots up to the last query's own.
        most_queries: of a sequence.
        most_slots: of a row.
    """

    first_query_C1: Tensor
    first_slot_C1: Tensor
    used_C: Tensor
    most_queries: int
    most_slots: int


def left_of(window: int | None) -> int:
    """The keys to the left of its own that a query sees, -1 for all, if it sees `window` with its own."""
    return -1 if window is None else window - 1


class RmsNorm:
    """The root-mean-square norm over the last dimension; `cpu.linear` and `between_gpu` compute it with what is around.

    torch has one operator for it on a GPU only. In fp32 on the CPU, where each small operator costs as much as the
    arithmetic, the vector's length is used: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).

    Attributes:
        weight_E: with `by_length` times sqrt(E).
        least_square: E eps.
    """

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        weight_E, width, self.eps = weight_E.detach(), weight_E.shape[0], eps
        self.by_length = weight_E.device.type == "cpu" and weight_E.dtype == torch.float32
        self.weight_E = weight_E * width**0.5 if self.by_length else weight_E
        self.least_square = width * self.eps
        self._least_length = weight_E.new_tensor(self.least_square**0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x (..., E)."""
        if not self.by_length:
            return functional.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least_length)
        return (x / lengths).mul_(self.weight_E)
