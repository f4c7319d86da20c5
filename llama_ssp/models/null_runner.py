"""A placeholder for a model that other ranks hold, so that a rank without a slice of it can run the same loop.

It keeps no cache and computes nothing; a rank with the logits sends its decision.

Shapes: B sequences, T positions of a forward, R positions to score.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.shapes import static_shape


@dataclass(kw_only=True, eq=False)
class NullRunner:
    """A `Runner` on ranks that hold nothing of the model."""

    device: torch.device
    vocab_size: int
    max_position_embeddings: int
    num_allocations: int = 0
    repeats_operators: bool = True
    repeats_at_any_length: bool = True
    is_thread_invariant: bool = True
    reads_by_length: bool = True
    packs_prompts: bool = False

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """Do nothing."""

    def forward(
        self, ids_BT: Tensor, *_positions: Tensor, score_positions_BR: Tensor | None = None, **_options: object
    ) -> Tensor:
        """Return empty logits (B, R, 0)."""
        num_rows, num_wanted = static_shape(ids_BT if score_positions_BR is None else score_positions_BR)
        return torch.empty(num_rows, num_wanted, 0, device=self.device)
