"""The heads of a layer and the sequences of a forward, as references and kernels of GPUs take them.

Shapes: H query heads, N key-value heads, D head dim, C sequences.
"""

from typing import NamedTuple

from torch import Tensor


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
