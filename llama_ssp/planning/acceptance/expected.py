"""What a plan expects a target to accept, what that makes of its rounds, and what would narrow the range."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llama_ssp.planning.acceptance.fitted import forecast
from llama_ssp.planning.acceptance.known import known
from llama_ssp.planning.acceptance.pair import Acceptance, DraftedPair, pair_of_job
from llama_ssp.planning.acceptance.rounds import Gain, tokens_per_round
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.time_error import TimeError

NARROW_KS = 2
"""Lengths by which the ends of a range of the best K may differ for a plan to recommend one."""
_LIKE_NOTHING = Acceptance(
    probability=0.3, low=0.05, high=0.8, is_forecast=True,
    source="no figure of this kind of draft: give speculation.acceptance=, or measure it",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RoundRanges:
    """80 % ranges of what follows from the acceptance: the low end, and the high end.

    Attributes:
        tokens_per_round: at the K that is priced.
        best_num_draft_tokens: the fastest K at either end of the acceptance.
    """

    tokens_per_round: tuple[float, float]
    best_num_draft_tokens: tuple[int, int]


def expected(pair: DraftedPair) -> Acceptance:
    """The pair's own figure, else a forecast; raises ConfigError for a user's file that is wrong."""
    return known(pair) or (forecast(pair) if pair.has_model else _LIKE_NOTHING)


def expected_of_job(job: PlanSpec) -> Acceptance:
    """The acceptance that the user gave, else what is expected of the pair."""
    if job.acceptance is not None:
        return Acceptance(probability=job.acceptance, source="given as speculation.acceptance")
    return expected(pair_of_job(job))


def token_times(rounds_s: Sequence[float], acceptance: float, gain: Gain = tokens_per_round) -> tuple[float, ...]:
    """Seconds per token for K = 1, 2, ... from those of a round."""
    return tuple(seconds / gain(acceptance, number) for number, seconds in enumerate(rounds_s, start=1))


def fastest(times: Sequence[float]) -> int:
    """The K that takes the least time per token."""
    return 1 + min(range(len(times)), key=times.__getitem__)


def ranges(
    acceptance: Acceptance, rounds_s: Sequence[float], *, chosen: int, gain: Gain = tokens_per_round
) -> RoundRanges | None:
    """The ranges at K = `chosen`, where rounds take `rounds_s` for K = 1, 2, ...; None for a given acceptance."""
    if not acceptance.has_range:
        return None
    low, high = acceptance.ends
    slow, fast = (token_times(rounds_s, each, gain) for each in (low, high))
    return RoundRanges(
        tokens_per_round=(gain(low, chosen), gain(high, chosen)),
        best_num_draft_tokens=(fastest(slow), fastest(fast)),
    )


def token_range(
    acceptance: Acceptance, round_s: float, error: TimeError | None, *, chosen: int, gain: Gain = tokens_per_round
) -> tuple[float, float] | None:
    """80 % range of the seconds per token of rounds of K = `chosen`: by the acceptance, and by the error of times.

    They do not depend on each other. None if neither is known.
    """
    if not (acceptance.has_range or error):
        return None
    low, middle, high = (
        gain(each, chosen) for each in (acceptance.ends[0], acceptance.probability, acceptance.ends[1])
    )
    start_s, half = round_s / middle, 0.0
    if error:
        start_s, half = start_s * math.exp(error.mean), error.quantile * error.spread
    faster, slower = math.log(high / middle), math.log(middle / low)
    return start_s * math.exp(-math.hypot(faster, half)), start_s * math.exp(math.hypot(slower, half))


def knows_best_k(acceptance: Acceptance, found: RoundRanges | None) -> bool:
    """Whether a plan may recommend a K: the pair has a figure, or the best K hardly depends on it."""
    if not acceptance.is_forecast or found is None:
        return True
    low, high = found.best_num_draft_tokens
    return high - low <= NARROW_KS


def remarks(job: PlanSpec, acceptance: Acceptance, found: RoundRanges | None) -> Iterator[str]:
    """What a plan notes of an acceptance that nobody has measured."""
    if not acceptance.is_forecast:
        return
    if found and not knows_best_k(acceptance, found):
        low, high = found.best_num_draft_tokens
        yield (
            f"the best K is {low} to {high}, by the acceptance: no K is recommended before the pair is measured; "
            "speculation.num_draft_tokens=auto finds it while it runs"
        )
    yield f"to narrow the ranges, measure the pair once: {measuring(job)}"


def measuring(job: PlanSpec) -> str:
    """The command that measures the pair of a job and stores its acceptance."""
    draft = job.draft.name if job.draft else job.free_draft
    own = " draft.tokenizer=own" if job.matching is not None else ""
    return f"llama-ssp run task=latency task.store=true model={job.target.name} draft={draft}{own}"
