"""Forecasts the time per token, plain and speculative, from the loop's sequence of forwards and messages.

    plain token   target forward of 1 row, a draw, one message
    round         K draft forwards (the first reads two tokens) with a draw each, the ids to all ranks,
                  target forward of K + 1 rows, the rule, the verdict to all ranks (see `messages`)
    prompt        chunks of 512 through the target and the draft; packed prompts have their mean length, others that of
                  the longest

Shapes: K drafted tokens.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

from llama_ssp.architectures.sizes import OWN_SLOTS_PER_SLOT, PREFILL_CHUNK
from llama_ssp.config.drafts.model import Matching
from llama_ssp.config.hardware import HardwareConfig, SizePoint
from llama_ssp.config.rules.rule import rule_of
from llama_ssp.config.schema import ADAPTIVE_LENGTHS, DraftLayout
from llama_ssp.config.target_placement import TargetKind
from llama_ssp.planning.acceptance.expected import (
    RoundRanges,
    expected_of_job,
    fastest,
    knows_best_k,
    ranges,
    token_times,
)
from llama_ssp.planning.acceptance.fitted import time_error
from llama_ssp.planning.acceptance.pair import Acceptance
from llama_ssp.planning.acceptance.rounds import tokens_per_round
from llama_ssp.planning.layerwise import READ_BYTES_PER_S, waiting_bytes
from llama_ssp.planning.measured import by_size
from llama_ssp.planning.memory import bucket_of
from llama_ssp.planning.messages import Message, round_messages
from llama_ssp.planning.overlap import OverlapForecast, OverlappedRounds, OverlappedTime
from llama_ssp.planning.roofline import (
    ForwardTime,
    ModelPlacement,
    bandwidth,
    forward_time,
    least_bytes,
    message_s,
    profile_of,
    working_set_bytes,
)
from llama_ssp.planning.spec import PlanSpec

RULE_PASSES = 6
"""Reads and writes of a row of probabilities by the rule: processors, softmax, comparison, cumulative sum."""
MOST_DRAFT_TOKENS = 16


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
        plain_range_s: the range of `plain_s` where it stands on data sheets; None on a machine that was measured.
        overlap: of a job whose drafting overlaps verification.
        ranges: of what follows from the acceptance; None for a given one.
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
    plain_range_s: tuple[float, float] | None = None
    ranges: RoundRanges | None = None

    @property
    def knows_best_k(self) -> bool:
        """Whether a plan may recommend `best_num_draft_tokens`."""
        return self.acceptance is not None and knows_best_k(self.acceptance, self.ranges)

    @property
    def best_s(self) -> float:
        """Seconds per token of the faster mode, while decoding."""
        return self.plain_s if self.speculative_s is None else min(self.plain_s, self.speculative_s)


class CostModel:
    """Prices the pieces of one job on one machine."""

    def __init__(self, job: PlanSpec, hardware: HardwareConfig) -> None:
        self.job = job
        self.hardware = hardware
        num_active = min(job.num_replicas * len(job.layout.ranks), hardware.num_gpus)
        place = partial(
            ModelPlacement, cuda_graphs=job.cuda_graphs, num_active=num_active, target_ranks=job.target_devices,
            kernels=job.kernels,
        )  # fmt: skip
        # Offloaded layers are read without overlap with compute.
        waiting_s = waiting_bytes(job) / READ_BYTES_PER_S.get(job.offload, math.inf)
        self.target = place(model=job.target, kind=job.target_kind, ranks=job.target_devices, waiting_s=waiting_s)
        ranks = job.draft_ranks[:1] if job.draft_kind is DraftLayout.replicated else job.draft_ranks
        place = partial(place, kind=TargetKind.tensor, ranks=ranks, whole=job.draft_whole)
        self.draft = place(model=job.draft) if job.draft else None
        middle = job.prompt_tokens + job.max_new_tokens // 2
        self.least_bytes = least_bytes(self.target, batch_size=job.batch_size, context=middle, device=job.device)
        self._bucket = bucket_of(middle + job.round_rows, job.num_slots, hardware)
        self._draft_bucket = self._bucket
        if job.matching is Matching.intersection:  # the host knows only a bound of its texts' lengths
            self._draft_bucket = min(self._bucket * OWN_SLOTS_PER_SLOT, job.draft_slots)
        self._profile = profile_of(hardware, num_active)

    def forward(self, placement: ModelPlacement, num_positions: int) -> ForwardTime:
        """A forward in the middle of decoding; a draft computes logits only for the last position."""
        return forward_time(
            placement, self.hardware, batch_size=self._rows_of(placement), num_positions=num_positions,
            num_scored=1 if placement is self.draft else num_positions,
            bucket=self._draft_bucket if placement is self.draft else self._bucket,
        )  # fmt: skip

    def _rows_of(self, placement: ModelPlacement) -> int:
        """Rows per rank: the batch, or a rank's share of it for a replicated draft."""
        if placement is self.draft and self.job.layout.splits_batch:
            return -(-self.job.batch_size // len(self.job.draft_ranks))
        return self.job.batch_size

    def prefill_s(self, placement: ModelPlacement) -> float:
        """The prompts of all rows, in chunks."""
        seconds, prompt = 0.0, self.job.prompt_tokens
        if self.job.mean_prompt_tokens and placement.model.packs_prompts(self.job.device):
            prompt = math.ceil(self.job.mean_prompt_tokens)
        for start in range(0, prompt, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, prompt)
            seconds += forward_time(
                placement, self.hardware, batch_size=self._rows_of(placement), num_positions=stop - start, num_scored=1,
                bucket=bucket_of(stop, self.job.num_slots, self.hardware),
            ).total_s  # fmt: skip
        return seconds

    def draw_s(self, placement: ModelPlacement) -> float:
        """Drawing a token from the logits of each row."""
        numbers = self._rows_of(placement) * self.job.target.shape.vocab_size
        return self._sampled_s(self._profile.draw if self._profile else None, self.job.kernels.draw, numbers)

    def rule_s(self, num_positions: int) -> float:
        """The rule on `num_positions` of each row that a rank verifies."""
        numbers = self._rows_of(self.draft or self.target) * num_positions * self.job.target.shape.vocab_size
        rule, points = rule_of(self.job.rule), self._profile.verify if self._profile else None
        more_s = self._kernels_s(rule.more_kernels, rule.more_passes, numbers)
        return self._sampled_s(points, self.job.kernels.verify, numbers) + more_s

    def _sampled_s(self, points: list[SizePoint] | None, num_kernels: int, numbers: int) -> float:
        """What a draw or the rule takes as measured, or as kernels that make `RULE_PASSES` over its numbers."""
        return by_size(points, numbers) if points else self._kernels_s(num_kernels, RULE_PASSES, numbers)

    def _kernels_s(self, num_kernels: int, num_passes: int, numbers: int) -> float:
        """Kernels that together make `num_passes` over fp32 numbers."""
        launch_s = self.hardware.kernel_s if self.job.cuda_graphs else self.hardware.launch_s
        return num_kernels * launch_s + num_passes * 4 * numbers / bandwidth(self.hardware)

    def agree_s(self, *messages: Message | None) -> float:
        """Messages between the ranks of a replica, one after the other."""
        return sum(message_s(self.hardware, m.ranks, m.payload_bytes * m.num_senders) for m in messages if m)

    @property
    def host_s(self) -> float:
        """Host time of the loop per round; on a GPU it overlaps with the device."""
        return self._profile.round_s if self._profile else 0.0

    def plain_s(self) -> float:
        """One plain token."""
        verdict_s = self.agree_s(round_messages(self.job, 0).verdict)
        return self.forward(self.target, 1).total_s + self.draw_s(self.target) + verdict_s + self.host_s

    def draft_step_s(self, num_positions: int) -> float:
        """One draft forward and its draw."""
        assert self.draft, "priced only where there is a draft"
        return self.forward(self.draft, num_positions).total_s + self.draw_s(self.draft)

    def verdict_s(self, num_draft_tokens: int) -> float:
        """The rule of a round, and the messages before and after it."""
        messages = round_messages(self.job, num_draft_tokens)
        return self.agree_s(messages.ids, messages.probabilities, messages.verdict) + self.rule_s(num_draft_tokens + 1)

    def drafting_s(self, num_draft_tokens: int) -> float:
        """All draft steps of a round; the first finds the caches as the target has left them."""
        if not (self.draft and num_draft_tokens):
            return 0.0
        points = self._profile.first_draft if self._profile else []
        more_s = by_size(points, working_set_bytes(self.target, self.hardware))
        return self.draft_step_s(self.job.first_draft_rows) + more_s + (num_draft_tokens - 1) * self.draft_step_s(1)

    def overlapped(self, num_draft_tokens: int) -> OverlappedTime:
        """A round in which drafting overlaps the target's forward of K positions."""
        messages = round_messages(self.job, num_draft_tokens)
        exchange_s = self.agree_s(messages.ids, messages.probabilities)
        return OverlappedTime(
            draft_s=self.drafting_s(num_draft_tokens), forward_s=self.forward(self.target, num_draft_tokens).total_s,
            exchange_s=exchange_s, settle_s=self.agree_s(messages.verdict) + self.rule_s(num_draft_tokens + 3),
            host_s=self.host_s, is_beside=self.job.device == "cuda",
            refill_s=self.drafting_s(num_draft_tokens - 1) + exchange_s if num_draft_tokens > 1 else 0.0,
        )  # fmt: skip

    def verify_s(self, num_draft_tokens: int) -> float:
        """Device time of a round after drafting."""
        return self.forward(self.target, num_draft_tokens + 1).total_s + self.verdict_s(num_draft_tokens)


def timing(job: PlanSpec, hardware: HardwareConfig) -> Timing:
    """Forecast the times of a job. Raises as `memory`."""
    costs = CostModel(job, hardware)
    plain_s = costs.plain_s()
    prefill_s = costs.prefill_s(costs.target)
    tokens = job.max_new_tokens
    read_bytes, error = costs.least_bytes, time_error(hardware)
    plain = Timing(
        target_forward=costs.forward(costs.target, 1),
        prefill_s=prefill_s,
        plain_prefill_s=prefill_s,
        plain_s=plain_s,
        plain_range_s=error.ends(plain_s) if error else None,
        plain_run_s=(prefill_s + (tokens - 1) * plain_s) / tokens,
        copy_share=read_bytes / bandwidth(hardware) / plain_s,
        limit_share=read_bytes / hardware.bandwidth_bytes_per_s / plain_s,
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
    speculative_s = by_number[chosen - 1]
    prefill_s = plain.prefill_s + (costs.prefill_s(costs.draft) if costs.draft else 0.0)
    # Prefill yields the first token; on average the length limit ends the last round halfway.
    num_rounds = max(job.max_new_tokens - 1 + (expected - 1) / 2, 0) / expected
    rounds_s = num_rounds * all_rounds_s[chosen - 1]
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
        round_s=all_rounds_s[chosen - 1],
        verify_s=costs.verify_s(chosen),
        other_s=costs.host_s,
        speculative_s=speculative_s,
        speculative_run_s=(prefill_s + rounds_s) / job.max_new_tokens,
        speedup=plain.plain_s / speculative_s,
        cost_ratio=step_s / plain.plain_s,
        by_num_draft_tokens=by_number,
        best_num_draft_tokens=fastest(by_number),
        overlap=rounds.forecast(chosen) if job.overlaps else None,
        ranges=ranges(acceptance, all_rounds_s, chosen=chosen, time_error=time_error(costs.hardware), gain=gain),
    )
