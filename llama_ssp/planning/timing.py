"""Forecasts the time per token, plain and speculative, from the loop's sequence of forwards and messages.

    plain token   target forward of 1 row, a draw, one message
    round         K draft forwards (the first reads two tokens) with a draw each, the ids to all ranks,
                  target forward of K + 1 rows, the rule, the verdict to all ranks (see `messages`)
    prompt        chunks of 512 through the target and the draft; packed prompts have their mean length, others that of
                  the longest

Shapes: K drafted tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import ADAPTIVE_LENGTHS
from llama_ssp.planning.acceptance import Acceptance, Gain, expected_of_job, fastest, token_times, tokens_per_round
from llama_ssp.planning.costs import CostModel
from llama_ssp.planning.overlap import OverlapForecast, OverlappedRounds
from llama_ssp.planning.roofline import ForwardTime, bandwidth
from llama_ssp.planning.spec import PlanSpec

MOST_DRAFT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """The figures that follow from the low and from the high acceptance, the smaller one first.

    Attributes:
        tokens_per_round: at the K that is priced.
        speculative_s: per token, at the same K.
        best_num_draft_tokens: the fastest K.
    """

    tokens_per_round: tuple[float, float]
    speculative_s: tuple[float, float]
    best_num_draft_tokens: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds and ratios; those of the draft are None without one.

    Attributes:
        target_forward, verify_forward: the target's forward of one token per row, and of K + 1.
        draft_forward_s: a draft forward of one token, including its draw.
        prefill_s: the prompt through the target and the draft, which is the time to the first token.
        plain_prefill_s: through the target alone.
        num_draft_tokens: K of the round that is priced: of an adaptive run the fastest at the assumed acceptance.
        plain_s, speculative_s: per token, while decoding.
        plain_run_s, speculative_run_s: per token of a completion, including the prompt and an unfinished last round.
        verify_s, other_s: the target's forward, rule and messages of a round; its host work.
        speedup: plain over speculative, while decoding.
        cost_ratio: c, a draft step over a plain target step.
        by_num_draft_tokens: speculative seconds per token for K = 1, 2, ...
        best_num_draft_tokens: the fastest K.
        overlap: of a job whose drafting overlaps verification.
        ranges: by the acceptance; None for a single figure of it.
        copy_share, limit_share: the physical limit, reading what a plain step must read (`roofline.least_bytes`), over
            plain decoding: at the speed of a copy, and at the data sheet's bandwidth.
    """

    target_forward: ForwardTime
    verify_forward: ForwardTime | None = None
    draft_forward_s: float | None = None
    prefill_s: float
    plain_prefill_s: float
    plain_s: float
    plain_run_s: float
    copy_share: float
    limit_share: float
    acceptance: Acceptance | None = None
    num_draft_tokens: int | None = None
    tokens_per_round: float | None = None
    round_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None
    speculative_s: float | None = None
    speculative_run_s: float | None = None
    speedup: float | None = None
    cost_ratio: float | None = None
    by_num_draft_tokens: tuple[float, ...] = ()
    best_num_draft_tokens: int | None = None
    overlap: OverlapForecast | None = None
    ranges: Ranges | None = None

    @property
    def knows_best_k(self) -> bool:
        """Whether a plan may recommend `best_num_draft_tokens`."""
        return self.acceptance is not None and not self.acceptance.is_forecast

    @property
    def best_s(self) -> float:
        """Seconds per token of the faster mode, while decoding."""
        return self.plain_s if self.speculative_s is None else min(self.plain_s, self.speculative_s)


def timing(job: PlanSpec, hardware: HardwareConfig) -> Timing:
    """Forecast the times of a job. Raises as `memory`."""
    costs = CostModel(job, hardware)
    plain_s = costs.plain_s()
    prefill_s = costs.prefill_s(costs.target)
    tokens = job.max_new_tokens
    plain = Timing(
        target_forward=costs.forward(costs.target, 1),
        prefill_s=prefill_s,
        plain_prefill_s=prefill_s,
        plain_s=plain_s,
        plain_run_s=(prefill_s + (tokens - 1) * plain_s) / tokens,
        copy_share=costs.least_bytes / bandwidth(hardware) / plain_s,
        limit_share=costs.least_bytes / hardware.bandwidth_bytes_per_s / plain_s,
    )
    return _speculative(costs, plain) if job.drafts else plain


def _speculative(costs: CostModel, plain: Timing) -> Timing:
    job = costs.job
    acceptance = expected_of_job(job)
    step_s = costs.draft_step_s(1) if costs.draft else 0.0
    rounds = OverlappedRounds(costs.overlapped, acceptance=acceptance.probability, batch_size=job.batch_size)

    def round_s(num_draft_tokens: int) -> float:
        if job.overlaps:
            return rounds.round_s(num_draft_tokens)
        return costs.drafting_s(num_draft_tokens) + costs.verify_s(num_draft_tokens) + costs.host_s

    chosen = job.num_draft_tokens
    all_rounds_s = [round_s(number) for number in range(1, max(MOST_DRAFT_TOKENS, chosen) + 1)]
    gain = rounds.gain if job.overlaps else tokens_per_round
    by_number = token_times(all_rounds_s, acceptance.probability, gain)
    if job.adapts:
        chosen = min(ADAPTIVE_LENGTHS, key=lambda number: by_number[number - 1])
    expected = gain(acceptance.probability, chosen)
    speculative_s, rounds_of = by_number[chosen - 1], all_rounds_s[chosen - 1]
    prefill_s = plain.prefill_s + (costs.prefill_s(costs.draft) if costs.draft else 0.0)
    # Prefill yields the first token; on average the length limit ends the last round halfway.
    num_rounds = max(job.max_new_tokens - 1 + (expected - 1) / 2, 0) / expected
    rounds_s = num_rounds * rounds_of
    if job.adapts and speculative_s > plain.plain_s:  # it goes on without drafts
        speculative_s, rounds_s = plain.plain_s, (job.max_new_tokens - 1) * plain.plain_s
    return replace(
        plain,
        verify_forward=costs.forward(costs.target, chosen + 1),
        draft_forward_s=step_s,
        prefill_s=prefill_s,
        acceptance=acceptance,
        num_draft_tokens=chosen,
        tokens_per_round=expected,
        round_s=rounds_of,
        verify_s=costs.verify_s(chosen),
        other_s=costs.host_s,
        speculative_s=speculative_s,
        speculative_run_s=(prefill_s + rounds_s) / job.max_new_tokens,
        speedup=plain.plain_s / speculative_s,
        cost_ratio=step_s / plain.plain_s,
        by_num_draft_tokens=by_number,
        best_num_draft_tokens=fastest(by_number),
        overlap=rounds.forecast(chosen) if job.overlaps else None,
        ranges=_ranges(acceptance, all_rounds_s, chosen, gain, most_s=plain.plain_s if job.adapts else math.inf),
    )


def _ranges(
    acceptance: Acceptance, rounds_s: Sequence[float], chosen: int, gain: Gain, *, most_s: float
) -> Ranges | None:
    """The ranges at K = `chosen`, where rounds take `rounds_s` for K = 1, 2, ... and no token more than `most_s`."""
    if acceptance.ends is None:
        return None
    low, high = acceptance.ends
    slow, fast = (token_times(rounds_s, each, gain) for each in (low, high))
    return Ranges(
        tokens_per_round=(gain(low, chosen), gain(high, chosen)),
        speculative_s=(min(fast[chosen - 1], most_s), min(slow[chosen - 1], most_s)),
        best_num_draft_tokens=(fastest(slow), fastest(fast)),
    )
