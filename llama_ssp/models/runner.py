"""What the loop knows of a model. Every backend and both implementations of a model stand behind it.

Shapes: B sequences, T positions of a forward, R rows of them that are wanted, V vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor


class Runner(Protocol):
    """A model on this rank, whole or in part, with its cache.

    Attributes:
        repeats_operators: a forward of the same shape calls the same operators on tensors that this object holds.
        num_allocations: how often `allocate` has made the cache anew, which is then at other addresses.
    """

    device: torch.device
    vocab_size: int
    max_position_embeddings: int
    num_allocations: int
    repeats_operators: bool

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """Make room for `batch_size` rows of `capacity` tokens; what is there already is kept when it is enough."""
        ...

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,
    ) -> Tensor:
        """Read tokens at given positions into the cache and score what follows each of them.

        A token sees the cache slots up to its own position. Writing at smaller positions than before rolls a row back.

        Args:
            ids_BT: token ids.
            positions_BT: where they stand in their rows.
            bucket: only the first `bucket` slots are read; all positions are below it.
            score_positions_BR: which of the T tokens to score; None for all.
            cache_rows_B: which rows of the cache the ids belong to; None for all of them, in order.

        Returns:
            Logits (B, R, V) in fp32, over the full vocabulary, on every rank of the model.
        """
        ...
