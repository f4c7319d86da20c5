"""A model that other ranks hold, so that a rank without a slice of it runs the same loop as they do.

It keeps no cache and computes nothing; the decision about its logits comes from the rank that has them.

Shapes: B sequences, T positions of a forward, R rows of them that are wanted.
"""

import torch
from torch import Tensor

from llama_ssp.shapes import static_shape


class NullRunner:
    """Stands in for a model where there is nothing of it; see `interface.Runner`.

    Args:
        device: of this rank.
        vocab_size: of the model.
        max_position_embeddings: of the model.
    """

    repeats_operators = True

    def __init__(self, *, device: torch.device, vocab_size: int, max_position_embeddings: int) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_allocations = 0

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """Needs no room."""

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,  # noqa: ARG002 - the protocol's
        *,
        bucket: int,  # noqa: ARG002
        score_positions_BR: Tensor | None = None,
        cache_rows_B: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Logits (B, R, 0): of no token."""
        num_rows, num_wanted = static_shape(ids_BT if score_positions_BR is None else score_positions_BR)
        return torch.empty(num_rows, num_wanted, 0, device=self.device)
