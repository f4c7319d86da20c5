"""Forecasts the time per token, plain and speculative, from the loop's sequence of forwards and messages.

    plain token   target forward of 1 row, a draw, one message
    round         K draft forwards (the first reads two tokens) with a draw each, the ids to all ranks,
                  target forward of K + 1 rows, the rule, the verdict to all ranks
    prompt        chunks of 512 through the target and the draft; packed prompts have their mean length, others that of
                  the longest

Messages between the ranks of one replica in a round, in addition to the collectives inside the models:

    ids              the drafted ids to all ranks, before the target's forward; a replicated draft gathers the rows of
                     each rank
    probabilities    from the draft to the rank that runs the rule, only if no rank holds both models
    verdict          number of accepted tokens, the next token, and the stop request

Drafting that overlaps verification: a round takes as long as the slower of K draft steps and a forward of K positions,
then the exchange and the rule:

    target    | forward of K ........ |      | exchange | rule |
    draft     | K steps .................... | exchange |
              |<----- the longer one ------->|

On GPUs the exchange is beside the forward, so that only the draft's side of a round has it. After a rejection, the
first token of the new block is verified early, or all rows wait for a block: K - 1 draft steps alone, and then a round
that examines K tokens.

Shapes: B sequences, K drafted tokens, V vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

from llama_ssp.architectures.sizes import OWN_SLOTS_PER_SLOT, PREFILL_CHUNK
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.profile import SizePoint
from llama_ssp.planning.acceptance import (
    Acceptance,
    expected_of_job,
    fastest,
    overlapped_corrections,
    overlapped_tokens,
    token_times,
    tokens_per_round,
)
from llama_ssp.planning.memory import READ_BYTES_PER_S, bucket_of, waiting_bytes
from llama_ssp.planning.roofline import (
    ForwardTime,
    ModelPlacement,
    bandwidth,
    by_size,
    forward_time,
    least_bytes,
    message_s,
)
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.drafters import Matching
from llama_ssp.settings.rules import rule_of
from llama_ssp.settings.schema import ADAPTIVE_LENGTHS, DraftLayout, TargetKind

ID_BYTES = 8
VERDICT_BYTES = 3 * ID_BYTES
"""Per row: number of accepted tokens, the next token, and the stop request."""
PROBABILITY_BYTES = 4


class Message(NamedTuple):
    """One kind of message of a round: each sender sends `payload_bytes` to every other rank."""

    payload_bytes: int
    ranks: tuple[int, ...]
    num_senders: int = 1

    @property
    def received_bytes(self) -> int:
        """Bytes received in a round, over all ranks."""
        return self.payload_bytes * self.num_senders * (len(self.ranks) - 1)


def round_messages(job: PlanSpec, num_draft_tokens: int) -> dict[str, Message]:
    """The messages of a round with K = `num_draft_tokens`, by kind, in order; a plain token has only the verdict."""
    layout, rows = job.layout, job.batch_size
    if len(layout.ranks) == 1:
        return {}
    drafts = bool(job.draft) and num_draft_tokens > 0
    num_senders = len(layout.ranks) if drafts and layout.splits_batch else 1
    if num_senders > 1:
        rows = -(-rows // len(layout.draft_ranks))
    found = {}
    if drafts:
        found["ids"] = Message(ID_BYTES * rows * num_draft_tokens, layout.ranks, num_senders)
    has_probs = rule_of(job.rule).needs_probs and job.matching is not Matching.text
    if drafts and layout.draft_source_rank not in layout.target_ranks and has_probs:
        num_bytes = PROBABILITY_BYTES * rows * num_draft_tokens * job.target.shape.vocab_size
        found["probabilities"] = Message(num_bytes, (layout.draft_source_rank, layout.verify_rank))
    found["verdict"] = Message(VERDICT_BYTES * rows, layout.ranks, num_senders)
    return found


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
    """A round of K drafted tokens whose drafting overlaps verification, at one acceptance."""

    time: OverlappedTime
    acceptance: float
    num_draft_tokens: int
    batch_size: int

    @property
    def alone_s(self) -> float:
        """Seconds of drafting alone per round, if rows wait: after every round in which any row was rejected."""
        return (1 - self.acceptance ** (self.num_draft_tokens * self.batch_size)) * self.time.refill_s

    @cached_property
    def waits(self) -> bool:
        """Whether tokens come clearly faster if rows wait for a block after a rejection, and verify no token early."""
        waiting_s = self.time.round_s + self.alone_s
        examined = tokens_per_round(self.acceptance, self.num_draft_tokens - 1)
        early = overlapped_tokens(self.acceptance, self.num_draft_tokens)
        return WORTH_WAITING * waiting_s / examined < self.time.round_s / early

    @property
    def round_s(self) -> float:
        """Seconds of the round, with the drafting alone before it."""
        return self.time.round_s + (self.alone_s if self.waits else 0.0)

    def gain(self, acceptance: float) -> float:
        """Expected tokens of the round, at any acceptance."""
        if self.waits:
            return tokens_per_round(acceptance, self.num_draft_tokens - 1)
        return overlapped_tokens(acceptance, self.num_draft_tokens)

    def document(self) -> dict[str, Any]:
        """A plan's figures: K draft steps, whether rows wait, shares of the round, and of the drafted tokens."""
        time, number, alone = self.time, self.num_draft_tokens, self.alone_s if self.waits else 0.0
        drafted, corrections = float(number), overlapped_corrections(self.acceptance, number)
        if self.waits:
            corrections = 1 - self.acceptance**number
            drafted = number + corrections * (number - 1)
        return {
            "draft_ms": 1e3 * time.draft_s,
            "waits": self.waits,
            "target_idle_share": (time.arrived_s - time.forward_s + alone) / self.round_s,
            "draft_idle_share": (time.arrived_s - time.draft_s + time.settle_s) / self.round_s,
            "dropped_share": 1 - (self.gain(self.acceptance) - corrections) / drafted,
        }


RULE_PASSES = 6
"""Reads and writes of a row of probabilities by the rule: processors, softmax, comparison, cumulative sum."""


_placement = lru_cache(maxsize=1024)(ModelPlacement)
"""A search places the same target with every draft, and prices the forwards of one placement once."""


class CostModel:
    """Prices the pieces of one job on one machine."""

    def __init__(self, job: PlanSpec, hardware: HardwareConfig) -> None:
        self.job = job
        self.hardware = hardware
        num_active = min(job.num_replicas * len(job.layout.ranks), hardware.num_gpus)
        place = partial(
            _placement, cuda_graphs=job.cuda_graphs, num_active=num_active, target_ranks=job.target_devices,
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
        self._profile = hardware.profile_of(num_active)

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
        if self.job.mean_prompt_tokens and placement.model.reads_by_length(self.hardware):
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
        """A draw or the rule, as measured or as kernels that make `RULE_PASSES` over its numbers."""
        return by_size(points, numbers) if points else self._kernels_s(num_kernels, RULE_PASSES, numbers)

    def _kernels_s(self, num_kernels: int, num_passes: int, numbers: int) -> float:
        """Kernels that together make `num_passes` over fp32 numbers."""
        launch_s = self.hardware.kernel_s if self.job.cuda_graphs else self.hardware.launch_s
        return num_kernels * launch_s + num_passes * 4 * numbers / bandwidth(self.hardware)

    def agree_s(self, num_draft_tokens: int, *kinds: str) -> float:
        """Messages of these kinds between the ranks of a replica, one after the other."""
        found = round_messages(self.job, num_draft_tokens)
        sent = [found[kind] for kind in kinds if kind in found]
        return sum(message_s(self.hardware, each.ranks, each.payload_bytes * each.num_senders) for each in sent)

    @property
    def host_s(self) -> float:
        """Host time of the loop per round; on a GPU it overlaps with the device."""
        return self._profile.round_s if self._profile else 0.0

    def plain_s(self) -> float:
        """One plain token."""
        drawn_s = self.forward(self.target, 1).total_s + self.draw_s(self.target)
        return drawn_s + self.agree_s(0, "verdict") + self.host_s

    def draft_step_s(self, num_positions: int) -> float:
        """One draft forward and its draw."""
        assert self.draft, "priced only where there is a draft"
        return self.forward(self.draft, num_positions).total_s + self.draw_s(self.draft)

    def verdict_s(self, num_draft_tokens: int) -> float:
        """The rule of a round, and the messages before and after it."""
        return self.agree_s(num_draft_tokens, "ids", "probabilities", "verdict") + self.rule_s(num_draft_tokens + 1)

    def drafting_s(self, num_draft_tokens: int) -> float:
        """All draft steps of a round; the first finds the caches as the target has left them."""
        if not (self.draft and num_draft_tokens):
            return 0.0
        first_s, later_s = self._draft_steps_s
        return first_s + (num_draft_tokens - 1) * later_s

    @cached_property
    def _draft_steps_s(self) -> tuple[float, float]:
        """The first draft step of a round, and each later one."""
        more_s = self._profile.first_draft_s if self._profile else 0.0
        return self.draft_step_s(self.job.first_draft_rows) + more_s, self.draft_step_s(1)

    def overlapped(self, num_draft_tokens: int) -> OverlappedTime:
        """A round in which drafting overlaps the target's forward of K positions."""
        exchange_s = self.agree_s(num_draft_tokens, "ids", "probabilities")
        settle_s = self.agree_s(num_draft_tokens, "verdict") + self.rule_s(num_draft_tokens + 3)
        return OverlappedTime(
            draft_s=self.drafting_s(num_draft_tokens), forward_s=self.forward(self.target, num_draft_tokens).total_s,
            exchange_s=exchange_s, settle_s=settle_s, host_s=self.host_s, is_beside=self.job.device == "cuda",
            refill_s=self.drafting_s(num_draft_tokens - 1) + exchange_s if num_draft_tokens > 1 else 0.0,
        )  # fmt: skip

    def verify_s(self, num_draft_tokens: int) -> float:
        """Device time of a round after drafting."""
        return self.forward(self.target, num_draft_tokens + 1).total_s + self.verdict_s(num_draft_tokens)


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
        tokens_per_round_range, speculative_s_range, best_num_draft_tokens_range: what follows from the low and from the
            high acceptance, the smaller figure first; None for a single figure of it. The first two are at the same K.
        overlap: of a job whose drafting overlaps verification; see `OverlapForecast.document`.
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
    tokens_per_round_range: tuple[float, float] | None = None
    speculative_s_range: tuple[float, float] | None = None
    best_num_draft_tokens_range: tuple[int, int] | None = None
    overlap: dict[str, Any] | None = None

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
    job, chosen = costs.job, costs.job.num_draft_tokens
    acceptance = expected_of_job(job)
    probability, lengths = acceptance.probability, range(1, max(MOST_DRAFT_TOKENS, chosen) + 1)
    overlapped = [
        OverlapForecast(
            time=costs.overlapped(number), acceptance=probability, num_draft_tokens=number, batch_size=job.batch_size
        )
        for number in lengths
        if job.overlaps
    ]
    rounds_s = [one.round_s for one in overlapped] or [
        costs.drafting_s(number) + costs.verify_s(number) + costs.host_s for number in lengths
    ]

    def gain(acceptance: float, number: int) -> float:
        return overlapped[number - 1].gain(acceptance) if overlapped else tokens_per_round(acceptance, number)

    by_number = token_times(rounds_s, probability, gain)
    if job.adapts:
        chosen = min(ADAPTIVE_LENGTHS, key=lambda number: by_number[number - 1])
    expected, speculative_s = gain(probability, chosen), by_number[chosen - 1]
    prefill_s = plain.prefill_s + (costs.prefill_s(costs.draft) if costs.draft else 0.0)
    # Prefill yields the first token; on average the length limit ends the last round halfway.
    decoding_s = max(job.max_new_tokens - 1 + (expected - 1) / 2, 0) / expected * rounds_s[chosen - 1]
    if job.adapts and speculative_s > plain.plain_s:  # it goes on without drafts
        speculative_s, decoding_s = plain.plain_s, (job.max_new_tokens - 1) * plain.plain_s
    step_s = costs.draft_step_s(1) if costs.draft else 0.0
    timed = replace(
        plain,
        verify_forward=costs.forward(costs.target, chosen + 1),
        draft_forward_s=step_s,
        prefill_s=prefill_s,
        acceptance=acceptance,
        num_draft_tokens=chosen,
        tokens_per_round=expected,
        round_s=rounds_s[chosen - 1],
        verify_s=costs.verify_s(chosen),
        other_s=costs.host_s,
        speculative_s=speculative_s,
        speculative_run_s=(prefill_s + decoding_s) / job.max_new_tokens,
        speedup=plain.plain_s / speculative_s,
        cost_ratio=step_s / plain.plain_s,
        by_num_draft_tokens=by_number,
        best_num_draft_tokens=fastest(by_number),
        overlap=overlapped[chosen - 1].document() if overlapped else None,
    )
    if acceptance.ends is None:
        return timed
    low, high = acceptance.ends
    slow, fast = (token_times(rounds_s, each, gain) for each in (low, high))
    most_s = plain.plain_s if job.adapts else math.inf
    return replace(
        timed,
        tokens_per_round_range=(gain(low, chosen), gain(high, chosen)),
        speculative_s_range=(min(fast[chosen - 1], most_s), min(slow[chosen - 1], most_s)),
        best_num_draft_tokens_range=(fastest(slow), fastest(fast)),
    )
