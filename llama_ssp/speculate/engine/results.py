"""Results of rounds, from a tensor of the device to the new tokens of completions."""

from typing import NamedTuple

from torch import Tensor

from llama_ssp.errors import LOGITS_ARE_NAN, NOTHING_ALLOWED
from llama_ssp.models.upload import Arriving
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.round import DraftChoice
from llama_ssp.speculate.engine.verifier import EMPTY, GOES_ON, NEWS, NOT_A_NUMBER, STOP_REQUESTED


class Update(NamedTuple):
    """New tokens of one completion; the first `num_drafted` were drafted, the target chose the rest.

    Attributes:
        rejected_ids: the drafted token that the target replaced by the last new token, and the drafted tokens after it.
    """

    completion: RowCompletion
    new_ids: list[int]
    num_drafted: int
    rejected_ids: list[int]


class RowResult(NamedTuple):
    """Decision of a round for one row; see `BatchState.commit`.

    Attributes:
        num_drafted, num_accepted: numbers of its drafted and of its accepted tokens.
        ids: the accepted tokens and the next token.
        rejected_ids: the drafted tokens of a chain that are not accepted.
        goes_on: whether the next token was drafted too, so that later drafted tokens stay in flight.
        error: why no next token can be drawn; None if it can.
    """

    num_drafted: int
    num_accepted: int
    ids: list[int]
    rejected_ids: list[int]
    goes_on: bool
    error: str | None


class RoundResult(NamedTuple):
    """Decisions of a round by row, and whether the deciding rank has announced a stop, and news."""

    rows: list[RowResult]
    stops: bool
    has_news: bool


class Launched(NamedTuple):
    """A prefill or a round that was launched, and not read yet.

    Attributes:
        result: (R, K + 3).
        owners: the completions of the R rows.
    """

    result: Arriving
    owners: list[RowCompletion | None]
    choice: DraftChoice
    is_prefill: bool

    @classmethod
    def of(
        cls, result: Tensor, owners: list[RowCompletion | None], choice: DraftChoice, *, is_prefill: bool
    ) -> "Launched":
        """Begin to copy a result to the host."""
        return cls(Arriving.of(result) if result.is_cuda else Arriving(result), owners, choice, is_prefill)

    def read(self, comm: Comm) -> RoundResult:
        """Wait for the result, and read it."""
        values = self.result.read(comm) if self.result.passed else self.result.values
        found, announced = list[RowResult](), 0
        for *drafted, num_accepted, next_id, flags in values.tolist():
            announced |= flags
            ids, goes_on = [*drafted[:num_accepted], next_id], bool(flags & GOES_ON)
            num_drafted = len(drafted) - drafted.count(-1)
            error = NOTHING_ALLOWED if flags & EMPTY else LOGITS_ARE_NAN if flags & NOT_A_NUMBER else None
            found.append(RowResult(num_drafted, num_accepted, ids, drafted[num_accepted:num_drafted], goes_on, error))
        return RoundResult(found, bool(announced & STOP_REQUESTED), bool(announced & NEWS))
