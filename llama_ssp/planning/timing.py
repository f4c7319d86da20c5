"""How long a token takes, plain and speculative: the loop's own sequence of forwards and messages, priced.

    plain token   target forward of 1 row, a draw, one message
    round         K draft forwards (the first reads two tokens) with a draw each, the ids to all ranks,
                  target forward of K + 1 rows, the rule, the verdict to all ranks (see `messages`)
    prompt        chunks of 512 through the target and the draft

Shapes: B sequences, K drafted tokens, V vocabulary.
"""

from dataclasses import dataclass, replace

from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.rules.rule import rule_of
from llama_ssp.config.schema import DraftLayout
from llama_ssp.config.target_placement import TargetKind
from llama_ssp.planning.acceptance import Acceptance, of_pair, tokens_per_round
from llama_ssp.planning.layerwise import waiting_s
from llama_ssp.planning.measured import line
from llama_ssp.planning.memory import PREFILL_CHUNK, bucket_of
from llama_ssp.planning.messages import Message, round_messages
from llama_ssp.planning.roofline import ForwardTime, ModelPlacement, bandwidth, forward_time, message_s, profile_of
from llama_ssp.planning.spec import PlannedModel, PlanSpec, model_bytes

DRAW_KERNELS = 17
VERIFY_KERNELS = 38
"""Kernels of a draw, and of a verification with commit: operators that are not views, counted at torch's dispatcher."""
RULE_PASSES = 6
"""How often the rule reads or writes a row of probabilities: processors, softmax, comparison, cumulative sum."""
MOST_DRAFT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds and ratios; everything of the draft is None without one.

    Attributes:
        target_forward: a forward of one token per row.
        verify_forward: a forward of K + 1 tokens per row.
        draft_forward_s: a draft forward of one token, its draw included.
        prefill_s: the prompt through the target, and through the draft where there is one.
        plain_s, speculative_s: per token, while decoding.
        plain_run_s, speculative_run_s: per token of a whole completion, prompt and unfinished last round included.
        round_s: a round.
        verify_s: its forward of the target, its rule and its messages.
        other_s: its host work.
        acceptance: what is assumed of the pair.
        tokens_per_round: expected.
        speedup: plain over speculative, while decoding.
        cost_ratio: c, a draft step over a plain target step.
        by_num_draft_tokens: speculative seconds per token for K = 1, 2, ...
        best_num_draft_tokens: the K of the smallest of them.
        limit_share: share of the physical limit, the weights read once at the data sheet's bandwidth, that plain
            decoding reaches.
    """

    target_forward: ForwardTime
    verify_forward: ForwardTime | None
    draft_forward_s: float | None
    prefill_s: float
    plain_s: float
    plain_run_s: float
    limit_share: float
    acceptance: Acceptance | None
    tokens_per_round: float | None
    round_s: float | None
    verify_s: float | None
    other_s: float | None
    speculative_s: float | None
    speculative_run_s: float | None
    speedup: float | None
    cost_ratio: float | None
    by_num_draft_tokens: tuple[float, ...]
    best_num_draft_tokens: int | None


class CostModel:
    """Prices the pieces of one job on one machine."""

    def __init__(self, job: PlanSpec, hardware: HardwareConfig) -> None:
        self.job = job
        self.hardware = hardware
        num_active = min(job.num_replicas * len(job.layout.ranks), hardware.num_gpus)
        self.target = ModelPlacement.of(
            job.target, job.target_kind, job.target_devices, cuda_graphs=job.cuda_graphs, num_active=num_active,
            waiting_s=waiting_s(job),
        )  # fmt: skip
        self.draft = self._draft_seat(job.draft, num_active) if job.draft else None
        middle = job.prompt_tokens + job.max_new_tokens // 2
        self._bucket = bucket_of(middle + job.round_rows, job.num_slots, hardware)

    def _draft_seat(self, draft: PlannedModel, num_active: int) -> ModelPlacement:
        alone = self.job.draft_kind is DraftLayout.replicated
        ranks = self.job.draft_ranks[:1] if alone else self.job.draft_ranks
        return ModelPlacement.of(
            draft, TargetKind.tensor, ranks, cuda_graphs=self.job.cuda_graphs, num_active=num_active
        )

    def forward(self, seat: ModelPlacement, num_positions: int) -> ForwardTime:
        """A forward in the middle of decoding; the last position alone gets logits from a draft."""
        return forward_time(
            seat, self.hardware, batch_size=self._rows_of(seat), num_positions=num_positions,
            num_scored=1 if seat is self.draft else num_positions, bucket=self._bucket,
        )  # fmt: skip

    def _rows_of(self, seat: ModelPlacement) -> int:
        """The rows that a rank reads at a time: of a draft that is whole on several, its share."""
        if seat is self.draft and self.job.layout.splits_batch:
            return -(-self.job.batch_size // len(self.job.draft_ranks))
        return self.job.batch_size

    def prefill_s(self, seat: ModelPlacement) -> float:
        """The prompt, in chunks."""
        seconds, prompt = 0.0, self.job.prompt_tokens
        for start in range(0, prompt, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, prompt)
            seconds += forward_time(
                seat, self.hardware, batch_size=self._rows_of(seat), num_positions=stop - start, num_scored=1,
                bucket=bucket_of(stop, self.job.num_slots, self.hardware),
            ).total_s  # fmt: skip
        return seconds

    def draw_s(self, seat: ModelPlacement) -> float:
        """A token for each row that a rank reads, from its logits."""
        numbers = self._rows_of(seat) * self.job.target.shape.vocab_size
        if profile := profile_of(self.hardware, self.target.num_active):
            return line([(point.size, point.s) for point in profile.draw], numbers)
        return self._kernels_s(DRAW_KERNELS, RULE_PASSES, numbers)

    def rule_s(self, num_positions: int) -> float:
        """The rule on so many positions of each row that a rank judges: its share, where rows are shared."""
        assert self.draft, "priced only where there is a draft"
        numbers = self._rows_of(self.draft) * num_positions * self.job.target.shape.vocab_size
        rule = rule_of(self.job.rule)
        more_s = self._kernels_s(rule.more_kernels, rule.more_passes, numbers)
        if profile := profile_of(self.hardware, self.target.num_active):
            return line([(point.size, point.s) for point in profile.verify], numbers) + more_s
        return self._kernels_s(VERIFY_KERNELS, RULE_PASSES, numbers) + more_s

    def _kernels_s(self, num_kernels: int, num_passes: int, numbers: int) -> float:
        """Kernels that read or write so many fp32 numbers so often together."""
        launch_s = self.hardware.kernel_s if self.job.cuda_graphs else self.hardware.launch_s
        return num_kernels * launch_s + num_passes * 4 * numbers / bandwidth(self.hardware)

    def agree_s(self, *messages: Message | None) -> float:
        """Messages between the ranks of a copy, one after the other."""
        return sum(
            message_s(self.hardware, message.ranks, message.payload_bytes * message.num_senders)
            for message in messages
            if message
        )

    @property
    def host_s(self) -> float:
        """What the loop itself takes in a round; on a GPU it runs beside the device."""
        profile = profile_of(self.hardware, self.target.num_active)
        return profile.round_s if profile else 0.0

    def plain_s(self) -> float:
        """One plain token."""
        verdict_s = self.agree_s(round_messages(self.job, 0).verdict)
        return self.forward(self.target, 1).total_s + self.draw_s(self.target) + verdict_s + self.host_s

    def draft_step_s(self, num_positions: int) -> float:
        """One draft forward and its draw; ranks that share the draft agree on each id."""
        assert self.draft, "priced only where there is a draft"
        agree_s = self.agree_s(round_messages(self.job, 1).steps)
        return self.forward(self.draft, num_positions).total_s + self.draw_s(self.draft) + agree_s

    def verdict_s(self, num_draft_tokens: int) -> float:
        """The rule of a round, and the messages before and after it."""
        told_s = self.agree_s(*round_messages(self.job, num_draft_tokens).after_drafting)
        return told_s + self.rule_s(num_draft_tokens + 1)

    def verify_s(self, num_draft_tokens: int) -> float:
        """All of a round that follows the draft on the device."""
        return self.forward(self.target, num_draft_tokens + 1).total_s + self.verdict_s(num_draft_tokens)


def timing(job: PlanSpec, hardware: HardwareConfig) -> Timing:
    """Price a job.

    Raises:
        PlacementError: a model cannot be laid out as asked.
    """
    clock = CostModel(job, hardware)
    plain_s = clock.plain_s()
    prefill_s = clock.prefill_s(clock.target)
    tokens = job.max_new_tokens
    plain = Timing(
        target_forward=clock.forward(clock.target, 1),
        verify_forward=None,
        draft_forward_s=None,
        prefill_s=prefill_s,
        plain_s=plain_s,
        plain_run_s=(prefill_s + (tokens - 1) * plain_s) / tokens,
        limit_share=_limit_s(clock) / plain_s,
        acceptance=None,
        tokens_per_round=None,
        round_s=None,
        verify_s=None,
        other_s=None,
        speculative_s=None,
        speculative_run_s=None,
        speedup=None,
        cost_ratio=None,
        by_num_draft_tokens=(),
        best_num_draft_tokens=None,
    )
    return _speculative(clock, plain) if job.draft else plain


def _speculative(clock: CostModel, plain: Timing) -> Timing:
    job = clock.job
    assert job.draft, "called only where there is a draft"
    assert clock.draft, "a draft has a seat"
    acceptance = (
        of_pair(job.target.name, job.draft.name)
        if job.acceptance is None
        else Acceptance(probability=job.acceptance, source="given as speculation.acceptance")
    )
    first_s, step_s = clock.draft_step_s(2), clock.draft_step_s(1)

    def round_s(num_draft_tokens: int) -> float:
        return first_s + (num_draft_tokens - 1) * step_s + clock.verify_s(num_draft_tokens) + clock.host_s

    chosen = job.num_draft_tokens
    numbers = range(1, max(MOST_DRAFT_TOKENS, chosen) + 1)
    by_number = tuple(round_s(number) / tokens_per_round(acceptance.probability, number) for number in numbers)
    expected = tokens_per_round(acceptance.probability, chosen)
    speculative_s, prefill_s = by_number[chosen - 1], plain.prefill_s + clock.prefill_s(clock.draft)
    # The prompt yields the first token; the length limit cuts the last round in half on average.
    num_rounds = max(job.max_new_tokens - 1 + (expected - 1) / 2, 0) / expected
    return replace(
        plain,
        verify_forward=clock.forward(clock.target, chosen + 1),
        draft_forward_s=step_s,
        prefill_s=prefill_s,
        acceptance=acceptance,
        tokens_per_round=expected,
        round_s=round_s(chosen),
        verify_s=clock.verify_s(chosen),
        other_s=clock.host_s,
        speculative_s=speculative_s,
        speculative_run_s=(prefill_s + num_rounds * round_s(chosen)) / job.max_new_tokens,
        speedup=plain.plain_s / speculative_s,
        cost_ratio=step_s / plain.plain_s,
        by_num_draft_tokens=by_number,
        best_num_draft_tokens=1 + min(range(len(by_number)), key=by_number.__getitem__),
    )


def _limit_s(clock: CostModel) -> float:
    """Reading every weight of the fullest rank once at the data sheet's bandwidth."""
    model, seat = clock.job.target, clock.target
    held = [model_bytes(share, model, device=clock.job.device).total_bytes for share in seat.shares]
    read = sum(held) if seat.kind is TargetKind.accelerate else max(held)
    return read / clock.hardware.bandwidth_bytes_per_s
