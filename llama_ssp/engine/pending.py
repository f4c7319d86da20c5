"""A round whose result has not been read."""

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
