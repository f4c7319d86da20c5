"""How well drafting overlapped verification: the idle time of either model's ranks, and the dropped tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankActivity:
    """What one rank did in the rounds of this part of a run.

    Attributes:
        waited_s: of the rounds' time, how long it waited for the other model.
        draft_cpu_s: how long its thread ran while it drafted; 0 on ranks of the target.
        waits: rows waited for a block after a rejection.
    """

    rank: int
    rounds_s: float
    waited_s: float
    num_rounds: int = 0
    draft_cpu_s: float = 0.0
    waits: bool = False

    @property
    def worked_s(self) -> float:
        """What is left without the waiting."""
        return self.rounds_s - self.waited_s


@dataclass(frozen=True, kw_only=True)
class OverlapSummary:
    """Results of drafting that overlaps verification.

    Attributes:
        waits: rows waited for a new block after a rejection; else its first token was verified early.
        target_idle_share, draft_idle_share: share of the rounds' time in which the ranks of a model waited for the
            other; the mean over the ranks, of the last part of a resumed run. None without rounds.
        num_drafted_tokens: drafted in all rounds and rows.
        num_dropped_tokens: of these, the ones that did not become text.
        ranks: what the shares are made of.
    """

    waits: bool
    target_idle_share: float | None
    draft_idle_share: float | None
    num_drafted_tokens: int
    num_dropped_tokens: int
    ranks: list[RankActivity]


def num_drafted(accepted_lengths: Sequence[int], num_draft_tokens: int, *, waits: bool) -> int:
    """Drafted tokens of a row: K in each round, and K - 1 before the first and after each rejection if it waits."""
    num_refills = 1 + sum(accepted < num_draft_tokens for accepted in accepted_lengths[:-1])
    alone = (num_draft_tokens - 1) * num_refills if waits and accepted_lengths else 0
    return num_draft_tokens * len(accepted_lengths) + alone


def round_gains(accepted_lengths: Sequence[int], num_draft_tokens: int, *, waits: bool) -> list[int]:
    """New tokens of each overlapped round of a row: one of the target's follows a rejection alone.

    Unless it waits, the first round, and each after a rejection, examines one drafted token; any other all K.
    """
    fewest = num_draft_tokens if waits else 1
    gains, num_examined = [], fewest
    for num_accepted in accepted_lengths:
        goes_on = num_accepted == num_examined
        gains.append(num_accepted + (not goes_on))
        num_examined = num_draft_tokens if goes_on else fewest
    return gains


def idle_share(activities: Sequence[RankActivity], ranks: Sequence[int]) -> float | None:
    """The mean share of some ranks' time in rounds that they waited; None without rounds."""
    shares = [each.waited_s / each.rounds_s for each in activities if each.rank in ranks and each.rounds_s]
    return sum(shares) / len(shares) if shares else None
