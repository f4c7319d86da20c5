"""Prices the pieces of decoding: forwards, the rule, messages, and the host's work.

Shapes: K drafted tokens.
"""

import math
from functools import cached_property, lru_cache, partial

from llama_ssp.architectures.sizes import OWN_SLOTS_PER_SLOT, PREFILL_CHUNK
from llama_ssp.config.drafters import Matching
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.machines.profile import SizePoint
from llama_ssp.config.rules import rule_of
from llama_ssp.config.schema import DraftLayout, TargetKind
from llama_ssp.planning.layerwise import READ_BYTES_PER_S, waiting_bytes
from llama_ssp.planning.measured import by_size
from llama_ssp.planning.memory import bucket_of
from llama_ssp.planning.messages import Message, round_messages
from llama_ssp.planning.overlap import OverlappedTime
from llama_ssp.planning.roofline import (
    ForwardTime,
    ModelPlacement,
    bandwidth,
    forward_time,
    least_bytes,
    message_s,
)
from llama_ssp.planning.spec import PlanSpec

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

    def exchange_s(self, num_draft_tokens: int) -> float:
        """The messages of a round before the rule."""
        messages = round_messages(self.job, num_draft_tokens)
        return self.agree_s(messages.ids, messages.probabilities)

    @cached_property
    def _agreement_s(self) -> float:
        """The message of a round after the rule, which is as long for every K."""
        return self.agree_s(round_messages(self.job, 1).verdict)

    def verdict_s(self, num_draft_tokens: int) -> float:
        """The rule of a round, and the messages before and after it."""
        return self.exchange_s(num_draft_tokens) + self._agreement_s + self.rule_s(num_draft_tokens + 1)

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
        exchange_s = self.exchange_s(num_draft_tokens)
        return OverlappedTime(
            draft_s=self.drafting_s(num_draft_tokens), forward_s=self.forward(self.target, num_draft_tokens).total_s,
            exchange_s=exchange_s, settle_s=self._agreement_s + self.rule_s(num_draft_tokens + 3),
            host_s=self.host_s, is_beside=self.job.device == "cuda",
            refill_s=self.drafting_s(num_draft_tokens - 1) + exchange_s if num_draft_tokens > 1 else 0.0,
        )  # fmt: skip

    def verify_s(self, num_draft_tokens: int) -> float:
        """Device time of a round after drafting."""
        return self.forward(self.target, num_draft_tokens + 1).total_s + self.verdict_s(num_draft_tokens)
