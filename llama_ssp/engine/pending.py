"""A round whose result has not been read, and what the host knows of the tokens in flight."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.engine.completion import RowCompletion
from llama_ssp.engine.round import DraftChoice


class PendingRound(NamedTuple):
    """A prefill or a round that was launched but not read yet; `passed` follows the copy of the result to the host."""

    result: Tensor
    owners: list[RowCompletion | None]
    choice: DraftChoice
    is_prefill: bool
    passed: torch.cuda.Event | None

    @property
    def max_new(self) -> int:
        """The most tokens that a row has grown by."""
        return self.choice.num_tokens + 1


def fill_up(owners: Sequence[RowCompletion | None], num_ahead: int) -> bool:
    """Whether a running row has no block in flight; afterwards all rows have one of `num_ahead` tokens."""
    running = [owner for owner in owners if owner]
    is_due = any(owner.num_ahead < num_ahead for owner in running)
    for owner in running:
        owner.num_ahead = num_ahead
    return is_due
