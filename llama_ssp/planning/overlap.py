"""Prices rounds whose drafting overlaps verification (`engine.overlap`).

A round takes as long as the slower of K draft steps and a forward of K positions, then the exchange and the rule:

    target    | forward of K ........ |      | exchange | rule |
    draft     | K steps .................... | exchange |
              |<----- the longer one ------->|

`acceptance.rounds.overlapped_tokens` has the tokens of a round. Of K drafted tokens those that become text are kept:
the tokens of a round without the target's own after a rejection.
"""

from dataclasses import dataclass

from llama_ssp.planning.acceptance.rounds import overlapped_corrections, overlapped_tokens


@dataclass(frozen=True, kw_only=True)
class OverlappedTime:
    """Seconds of a round's pieces: both models at once, then what either waits for."""

    draft_s: float
    forward_s: float
    exchange_s: float
    settle_s: float
    host_s: float

    @property
    def round_s(self) -> float:
        """The round."""
        return max(self.draft_s, self.forward_s) + self.exchange_s + self.settle_s + self.host_s

    @property
    def target_idle_share(self) -> float:
        """Share of a round in which the target's ranks wait for the draft."""
        return (max(self.draft_s - self.forward_s, 0.0) + self.exchange_s) / self.round_s

    @property
    def draft_idle_share(self) -> float:
        """Share of a round in which the draft's ranks wait for the target."""
        return (max(self.forward_s - self.draft_s, 0.0) + self.exchange_s + self.settle_s) / self.round_s


@dataclass(frozen=True, kw_only=True)
class OverlapForecast:
    """What a plan expects of overlapped rounds.

    Attributes:
        draft_s: K draft steps.
        target_idle_share, draft_idle_share: of a round.
        dropped_share: of the drafted tokens.
    """

    draft_s: float
    target_idle_share: float
    draft_idle_share: float
    dropped_share: float

    @property
    def shares(self) -> dict[str, float]:
        """The shares by their names."""
        return {name: value for name, value in vars(self).items() if name.endswith("_share")}


def overlap_forecast(time: OverlappedTime, *, acceptance: float, num_draft_tokens: int) -> OverlapForecast:
    """The shares of a job."""
    kept = overlapped_tokens(acceptance, num_draft_tokens) - overlapped_corrections(acceptance, num_draft_tokens)
    return OverlapForecast(
        draft_s=time.draft_s,
        target_idle_share=time.target_idle_share,
        draft_idle_share=time.draft_idle_share,
        dropped_share=1 - kept / num_draft_tokens,
    )
