"""A placeholder for a model that other ranks hold, so that a rank without a slice of it can run the same loop.

It keeps no cache and computes nothing; a rank with the logits sends its decision.

Shapes: B sequences, T positions of a forward, R positions to score.
"""

import torch
from torch import Tensor

from llama_ssp.shapes import static_shape


class NullRunner:
    """A `Runner` on ranks that hold nothing of the model."""

    repeats_operators = True

    def __init__(self, *, device: torch.device, vocab_size: int, max_position_embeddings: int) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_allocations = 0

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """Do nothing."""

    def forward(
        self, ids_BT: Tensor, *_positions: Tensor, score_positions_BR: Tensor | None = None, **_options: object
    ) -> Tensor:
        """Return empty logits (B, R, 0)."""
        num_rows, num_wanted = static_shape(ids_BT if score_positions_BR is None else score_positions_BR)
        return torch.empty(num_rows, num_wanted, 0, device=self.device)
