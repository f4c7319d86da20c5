"""Prices rounds whose drafting overlaps verification (`engine.overlap`).

A round takes as long as the slower of K draft steps and a forward of K positions, then the exchange and the rule:

    target    | forward of K ........ |      | exchange | rule |
    draft     | K steps .................... | exchange |
              |<----- the longer one ------->|

On GPUs the exchange is beside the forward, so that only the draft's side of a round has it.

After a rejection, the first token of the new block is verified early, or all rows wait for a block: K - 1 draft steps
alone, and then a round that examines K tokens. `acceptance.rounds` has the tokens of either kind of round.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from llama_ssp.planning.acceptance import overlapped_corrections, overlapped_tokens, tokens_per_round

WORTH_WAITING = 1.1
"""Times faster that tokens must come for rows to wait: where both ways are about equal, the target idles less if none
waits, and a rank that has idled begins cold."""


@dataclass(frozen=True, kw_only=True)
class OverlappedTime:
    """Seconds of a round's pieces: both models at once, then what either waits for.

    Attributes:
        is_beside: the exchange takes no time of the target, which computes meanwhile.
        refill_s: what precedes the round if a row waits for a block: K - 1 draft steps alone, and their exchange.
    """

    draft_s: float
    forward_s: float
    exchange_s: float = 0.0
    settle_s: float = 0.0
    host_s: float = 0.0
    refill_s: float = 0.0
    is_beside: bool = False

    @property
    def arrived_s(self) -> float:
        """From the begin of a round until the target has computed, and has what the draft has drafted."""
        forward_s = self.forward_s + (0.0 if self.is_beside else self.exchange_s)
        return max(self.draft_s + self.exchange_s, forward_s)

    @property
    def round_s(self) -> float:
        """The round, without what may precede it."""
        return self.arrived_s + self.settle_s + self.host_s


@dataclass(frozen=True, kw_only=True)
class OverlapForecast:
    """What a plan expects of overlapped rounds.

    Attributes:
        waits: rows wait for a new block after a rejection; else its first token is verified early.
        draft_s: K draft steps.
        target_idle_share, draft_idle_share: of a round.
        dropped_share: of the drafted tokens.
    """

    waits: bool
    draft_s: float
    target_idle_share: float
    draft_idle_share: float
    dropped_share: float

    def document(self) -> dict[str, Any]:
        """The fields, in milliseconds."""
        fields = asdict(self)
        return {"draft_ms": 1e3 * fields.pop("draft_s")} | fields


def alone_s(time: OverlappedTime, *, acceptance: float, num_draft_tokens: int, batch_size: int) -> float:
    """Seconds of drafting alone per round, if rows wait: after every round in which any row was rejected."""
    return (1 - acceptance ** (num_draft_tokens * batch_size)) * time.refill_s


def better_to_wait(time: OverlappedTime, *, acceptance: float, num_draft_tokens: int, batch_size: int) -> bool:
    """Whether tokens come clearly faster if rows wait for a block after a rejection than with one token verified."""
    waiting_s = time.round_s + alone_s(
        time, acceptance=acceptance, num_draft_tokens=num_draft_tokens, batch_size=batch_size
    )
    examined = tokens_per_round(acceptance, num_draft_tokens - 1)
    return WORTH_WAITING * waiting_s / examined < time.round_s / overlapped_tokens(acceptance, num_draft_tokens)


class OverlappedRounds:
    """The rounds of a job by K, at one acceptance.

    Args:
        time_of: the pieces of a round with K.

    Attributes:
        waits: whether rows wait in rounds of K; see `better_to_wait`.
    """

    def __init__(self, time_of: Callable[[int], OverlappedTime], *, acceptance: float, batch_size: int) -> None:
        self._time_of = cache(time_of)
        self._acceptance = acceptance
        self._batch_size = batch_size
        self.waits = cache(self._better_to_wait)

    def _better_to_wait(self, num_draft_tokens: int) -> bool:
        return better_to_wait(self._time_of(num_draft_tokens), **self._job(num_draft_tokens))

    def round_s(self, num_draft_tokens: int) -> float:
        """Seconds of a round, with the drafting alone before it."""
        return self._time_of(num_draft_tokens).round_s + self._alone_s(num_draft_tokens)

    def gain(self, acceptance: float, num_draft_tokens: int) -> float:
        """Expected tokens of a round, at any acceptance."""
        if self.waits(num_draft_tokens):
            return tokens_per_round(acceptance, num_draft_tokens - 1)
        return overlapped_tokens(acceptance, num_draft_tokens)

    def forecast(self, num_draft_tokens: int) -> OverlapForecast:
        """What a plan says of them."""
        time, waits = self._time_of(num_draft_tokens), self.waits(num_draft_tokens)
        round_s, whole = self.round_s(num_draft_tokens), self._acceptance**num_draft_tokens
        alone = self._alone_s(num_draft_tokens)
        drafted, corrections = float(num_draft_tokens), overlapped_corrections(self._acceptance, num_draft_tokens)
        if waits:
            drafted, corrections = num_draft_tokens + (1 - whole) * (num_draft_tokens - 1), 1 - whole
        kept = self.gain(self._acceptance, num_draft_tokens) - corrections
        return OverlapForecast(
            waits=waits,
            draft_s=time.draft_s,
            target_idle_share=(time.arrived_s - time.forward_s + alone) / round_s,
            draft_idle_share=(time.arrived_s - time.draft_s + time.settle_s) / round_s,
            dropped_share=1 - kept / drafted,
        )

    def _alone_s(self, num_draft_tokens: int) -> float:
        if not self.waits(num_draft_tokens):
            return 0.0
        return alone_s(self._time_of(num_draft_tokens), **self._job(num_draft_tokens))

    def _job(self, num_draft_tokens: int) -> dict[str, Any]:
        return {
            "acceptance": self._acceptance,
            "num_draft_tokens": num_draft_tokens,
            "batch_size": self._batch_size,
        }
