"""Results of rounds, from a tensor of the device to the new tokens of completions."""

from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.verifier import GOES_ON, NEWS, NOT_A_NUMBER, STOP_REQUESTED


class Update(NamedTuple):
    """New tokens of one completion; the first `num_drafted` were drafted, the target chose the rest.

    Attributes:
        rejected_ids: drafted tokens in whose place the target chose the last new one, and those after them.
    """

    completion: RowCompletion
    new_ids: list[int]
    num_drafted: int
    rejected_ids: list[int]


class RowResult(NamedTuple):
    """Decision of a round for one row; see `BatchState.commit`.

    Attributes:
        num_drafted, num_accepted: of its drafted tokens.
        ids: the accepted ones and the next one.
        rejected_ids: the drafted ones of a chain that are not accepted.
        goes_on: the next one was drafted too, and later drafted tokens are in flight.
        is_nan: its logits are not numbers.
    """

    num_drafted: int
    num_accepted: int
    ids: list[int]
    rejected_ids: list[int]
    goes_on: bool
    is_nan: bool


class RoundResult(NamedTuple):
    """Decisions of a round, by row, and whether the deciding rank has announced a wish to stop, and news."""

    rows: list[RowResult]
    stops: bool
    has_news: bool


class Launched(NamedTuple):
    """A prefill or a round that was launched, and not read yet.

    Attributes:
        result: (R, K + 3), on the way to the host.
        owners: the completions of the R rows.
        passed: an event that follows the copy to the host; None on a CPU.
    """

    result: Tensor
    owners: list[RowCompletion | None]
    choice: DraftChoice
    is_prefill: bool
    passed: torch.cuda.Event | None

    @classmethod
    def of(
        cls, result: Tensor, owners: list[RowCompletion | None], choice: DraftChoice, *, is_prefill: bool
    ) -> "Launched":
        """Begin to copy a result to the host."""
        passed = None
        if result.is_cuda:
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            result = host.copy_(result, non_blocking=True)
            passed = torch.cuda.Event()
            passed.record()
        return cls(result, owners, choice, is_prefill, passed)

    def read(self, comm: Comm) -> RoundResult:
        """Wait for the result, and read it."""
        if self.passed:
            comm.wait(self.passed)
        found, announced = list[RowResult](), 0
        for *drafted, num_accepted, next_id, flags in self.result.tolist():
            announced |= flags
            ids, goes_on, is_nan = [*drafted[:num_accepted], next_id], bool(flags & GOES_ON), bool(flags & NOT_A_NUMBER)
            found.append(RowResult(len(drafted), num_accepted, ids, drafted[num_accepted:], goes_on, is_nan))
        return RoundResult(found, bool(announced & STOP_REQUESTED), bool(announced & NEWS))
