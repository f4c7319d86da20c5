"""Forecasts the time of a token, plain and speculative, from the loop's forwards and messages.

    plain token   target forward of 1 row, a draw, one message
    round         K draft forwards (the first reads two tokens) with a draw each, the ids to all ranks,
                  target forward of K + 1 rows, the rule, the verdict to all ranks
    prompt        chunks of 512 through the target and the draft; packed prompts have their mean length, padded ones
                  the longest

Where drafting overlaps verification, a round takes as long as the slower of K draft steps and a forward of K positions,
then the exchange and the rule (docs/design/overlap.md). On GPUs the exchange goes on during the forward, so that only
the draft's side of a round has it. After a rejection, the first token of the new block is verified early.

Only one kind of GPU has run this engine, so 80 % ranges of its times are the errors of forecasts for other engines, by
architecture, format and rows: `python -m benchmarks.published` and `python -m benchmarks.served` count how many rows
they hold. A calibrated machine and a CPU have none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from operator import truediv
from typing import Any, TypeAlias

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import inventory
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.acceptance import (
    Acceptance,
    expected_of_spec,
    overlapped_corrections,
    overlapped_tokens,
)
from llama_ssp.planning.collectives import guesses_sums, message_s, round_messages
from llama_ssp.planning.forwards import MOST_DRAFT_TOKENS, ForwardTime, ModelPlacement, ShardDraws, forward_time
from llama_ssp.planning.memory import bucket_of
from llama_ssp.planning.model import DTYPE_BYTES
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.weights import step_bytes
from llama_ssp.settings.backends import TENSOR, Backend
from llama_ssp.settings.rules import AT_ZERO, rule_of
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.storage.formats import NO_QUANTIZATION

Ends: TypeAlias = tuple[float, float]
"""The smaller and the larger end, of seconds or of factors of them."""

NEAR, PACKED, MANY, SHORT, OTHER = (0.87, 1.25), (0.90, 1.27), (0.80, 1.75), (0.90, 2.30), (0.76, 1.56)
"""Published over forecast time per token, least and most: in 16 bits up to 64 rows; in 8 and 4 bits up to 32 rows; at
more rows; at steps below 2.5 ms, whose time an engine's host decides; on GPUs without published rows (NEAR squared)."""
FAR, FIRST, GAINS = (0.70, 2.24), (0.85, 1.75), (0.70, 1.05)
"""The same where nothing is published, for first tokens, and for the gains of drafts."""
MOST_NEAR, MOST_PACKED, LEAST_STEP_S = 64, 32, 0.0025
PUBLISHED_GPUS = ("A100", "H100", "H200", "B200", "MI250", "RTX 4090")


@dataclass(frozen=True, kw_only=True)
class OverlappedTime:
    """Seconds of a round that overlaps: both models compute at once, then each may wait for the other.

    Attributes:
        hides_exchange: whether the exchange takes no time of the target, which computes meanwhile.
    """

    draft_s: float
    forward_s: float
    exchange_s: float = 0.0
    verdict_s: float = 0.0
    hides_exchange: bool = False

    @property
    def arrived_s(self) -> float:
        """Seconds from the start of a round until the target has ended its forward and has the drafted tokens."""
        forward_s = self.forward_s + (0.0 if self.hides_exchange else self.exchange_s)
        return max(self.draft_s + self.exchange_s, forward_s)

    @property
    def round_s(self) -> float:
        """The whole round."""
        return self.arrived_s + self.verdict_s

    def document(self, acceptance: float, num_draft_tokens: int) -> dict[str, Any]:
        """The figures of a plan: the time of the draft steps, idle shares, and the share of dropped drafted tokens."""
        kept = overlapped_tokens(acceptance, num_draft_tokens) - overlapped_corrections(acceptance, num_draft_tokens)
        return {
            "draft_ms": 1e3 * self.draft_s,
            "target_idle_share": (self.arrived_s - self.forward_s) / self.round_s,
            "draft_idle_share": (self.arrived_s - self.draft_s + self.verdict_s) / self.round_s,
            "dropped_share": 1 - kept / num_draft_tokens,
        }


MOST_IN_GROUPS = 0.8
"""Share of the time of one group below which several are taken: forecasts of few rows are too short (findings/cpus)."""
RULE_PASSES = 6
"""Reads and writes of a row of probabilities by the rule: processors, softmax, comparison, cumulative sum."""


_placement = lru_cache(maxsize=1024)(ModelPlacement)
"""A search places the same target with every draft, and prices the forwards of one placement once."""


class CostModel:
    """Prices the pieces of one spec on one machine."""

    def __init__(self, spec: PlanSpec, hardware: HardwareConfig) -> None:
        self.spec = spec
        self.hardware = hardware

        def place(*, backend: Backend = TENSOR, ranks: tuple[int, ...], **of_model: Any) -> ModelPlacement:
            is_own = not backend.by_library and spec.takes_own_sums(hardware, ranks)
            return _placement(
                backend=backend,
                ranks=ranks,
                own_sums=is_own,
                equal_bits=spec.equal_bits,
                cuda_graphs=spec.cuda_graphs,
                kernels=spec.kernels,
                **of_model,
            )

        best, over_target, over_draft = ShardDraws(AT_ZERO), *spec.draws_over_shards
        over = ShardDraws(spec.rule, spec.is_certain, spec.device == "cuda")
        takes_best = spec.takes_best and not spec.backend.by_library
        of_target = best if takes_best else over if over_target else None
        of_stages = (spec.target_devices,) if spec.num_stages == 1 else spec.layout.stages
        self.stages = tuple(
            place(
                model=spec.target,
                backend=spec.backend,
                ranks=of_stage,
                draws=of_target,
                stages=spec.stages,
                stage=number,
            )
            for number, of_stage in enumerate(of_stages)
        )
        self.target = self.stages[-1]  # which makes the logits
        ranks = spec.draft_ranks[:1] if spec.draft_kind is DraftLayout.replicated else spec.draft_ranks
        of_draft = partial(place, ranks=ranks, whole=spec.draft_whole)
        draws = best if spec.draft_finds_best else over if over_draft else None
        self.draft = of_draft(model=spec.draft, draws=draws) if spec.draft else None
        self.own_part = None
        if layers := spec.free_terms.layers:
            shape, held = replace(spec.target.shape, num_hidden_layers=layers), spec.target.shape.modules
            if held is not None:
                shape = replace(shape, modules=held.of_layers(range(layers), first=True, last=True))
            own = replace(spec.target, shape=shape)
            if (copied := spec.free_terms.copied_format) is not None:
                own = replace(own, quantization=copied)
            self.own_part = replace(self.target, model=own, draws=None, stages=(range(layers),))
        self._middle = spec.prompt_tokens + spec.max_new_tokens // 2
        self._bucket = bucket_of(self._middle + spec.round_positions, spec.num_slots, hardware)
        # Of a text in its own tokens the host knows only a bound of the length.
        self._draft_bucket = min(self._bucket * spec.vocabulary.slots_per_slot, spec.draft_slots)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes that a plain step must read in the middle of a completion: the weights once, and keys and values.

        They are those of the slowest rank; of a layer-wise target, those of all devices, which compute one after the
        other. Read at the speed of a copy, they set the physical limit.
        """
        spec, placement = self.spec, self.target
        of_stages = (
            [[inventory(spec.target.shape)]]
            if placement.backend.is_layer_wise
            else [stage.shares for stage in self.stages]
        )
        weights = sum(max(step_bytes(held, spec.target, device=spec.device) for held in shares) for shares in of_stages)
        return weights + spec.batch_size * self._middle * spec.target.slot_bytes(placement.most_heads[1])

    def forward(self, placement: ModelPlacement, num_positions: int) -> ForwardTime:
        """A forward in the middle of decoding, through all stages; a draft scores only the last position.

        Groups of rows follow each other: after the first one has passed all stages, the slowest stage sets the pace.
        """
        if len(self._stages_of(placement)) == 1:
            return self._forwards(placement, num_positions)[0]
        return self._in_groups(self.num_groups, num_positions)

    @cached_property
    def num_groups(self) -> int:
        """Groups of rows that follow each other through the stages: the number that is fastest, if it gains much."""
        spec = self.spec
        if spec.num_stages == 1:
            return 1
        if spec.num_groups:
            return min(spec.num_groups, spec.batch_size)
        positions = spec.round_positions if spec.drafts else 1
        numbers = range(1, min(spec.batch_size, 2 * spec.num_stages) + 1)
        times = {number: self._in_groups(number, positions).total_s for number in numbers}
        fastest = min(numbers, key=lambda number: times[number])
        return fastest if times[fastest] < MOST_IN_GROUPS * times[1] else 1

    def _in_groups(self, num_groups: int, num_positions: int) -> ForwardTime:
        """A forward of the target in so many groups of rows."""
        times, rows = self._forwards(self.target, num_positions, num_groups), self._rows_of_group(num_groups)
        slowest = max(times, key=lambda each: each.total_s)
        hops_s = self.hops_s(rows * num_positions)
        hops_s += (num_groups - 1) * hops_s / (len(times) - 1)
        return ForwardTime.sum([*times, *[slowest] * (num_groups - 1)], messages_s=hops_s)

    def _rows_of_group(self, num_groups: int) -> int:
        """Rows of the largest group."""
        return -(-self.spec.batch_size // num_groups)

    def _forwards(self, placement: ModelPlacement, num_positions: int, num_groups: int = 1) -> list[ForwardTime]:
        rows = self._rows_of_group(num_groups) if placement is self.target else self._rows_of(placement)
        return [
            forward_time(
                stage,
                self.hardware,
                batch_size=rows,
                num_positions=num_positions,
                num_scored=1 if placement is self.draft else num_positions,
                bucket=self._draft_bucket if placement is self.draft else self._bucket,
            )
            for stage in self._stages_of(placement)
        ]

    def _stages_of(self, placement: ModelPlacement) -> tuple[ModelPlacement, ...]:
        return self.stages if placement is self.target else (placement,)

    def stages_s(self, num_positions: int) -> tuple[float, ...]:
        """Each stage's part of a forward in the middle of decoding, of all groups, without messages between stages."""
        times = self._forwards(self.target, num_positions, self.num_groups)
        return tuple(self.num_groups * each.total_s for each in times)

    def hops_s(self, num_tokens: int) -> float:
        """Messages of hidden states from stage to stage; each rank sends its slice to one of the next stage."""
        pairs = pairwise(self.spec.layout.stages)
        return sum(
            message_s(self.hardware, (ranks[0], others[0]), num_tokens * hop_bytes / len(ranks))
            for (ranks, others), hop_bytes in zip(pairs, self.spec.hop_bytes, strict=True)
        )

    def collectives(self, num_draft_tokens: int) -> tuple[int, int]:
        """Number of collectives of a round, with the ones between the models, and their bytes on each rank."""
        forwards = [(self.target, num_draft_tokens + (not self.spec.overlaps))]
        if self.draft and num_draft_tokens:
            drafting = self.spec.first_draft_positions, *self.spec.later_draft_forwards(num_draft_tokens)
            forwards += [(self.draft, number) for number in drafting]
        if self.own_part and num_draft_tokens:
            forwards += [(self.own_part, number) for number in self._own_forwards(num_draft_tokens)]
        numbers = {"hidden": (len(self.stages) - 1) * self.num_groups}
        sent = [
            (numbers.get(kind, 1), message.num_bytes)
            for kind, message in round_messages(self.spec, num_draft_tokens).items()
        ]
        for placement, number in forwards:
            rows, num_scored = self._rows_of(placement), number if placement is self.target else 1
            times = self.num_groups if placement is self.target else 1
            of_stages = [stage.collectives(rows, number, num_scored) for stage in self._stages_of(placement)]
            sent += [(times * count, num_bytes) for count, num_bytes in of_stages]
        return sum(number for number, _ in sent), sum(num_bytes for _, num_bytes in sent)

    def _rows_of(self, placement: ModelPlacement) -> int:
        return self.spec.draft_rows if placement is self.draft else self.spec.batch_size

    def prefill_s(self, placement: ModelPlacement) -> float:
        """Seconds of reading the prompts of all rows; the prompt of several samples is read once.

        A few tokens are read by one graph, more of them in chunks. A GPU computes a chunk while Python launches the
        next operators. A stage reads the next chunk while later stages read the one before.
        """
        stages, seconds, prompt = self._stages_of(placement), 0.0, self.spec.prompt_tokens
        num_rows = -(-self._rows_of(placement) // self.spec.num_samples)
        if placement is self.draft and self.spec.num_kept is not None:
            prompt = min(prompt, self.spec.num_kept)
        if by_length := placement.model.reads_by_length(self.hardware):
            prompt = min(prompt, math.ceil(self.spec.mean_prompt_tokens or prompt))
        has_graph = by_length and placement.cuda_graphs and not (placement is self.draft and self.spec.has_head)
        if size := has_graph * engine.short_size(num_rows * prompt):
            short = partial(
                forward_time,
                hardware=self.hardware,
                batch_size=1,
                num_positions=size,
                num_scored=min(size, num_rows),
                bucket=bucket_of(prompt, self.spec.num_slots, self.hardware),
            )
            return sum(short(stage).total_s for stage in stages) + (self.hops_s(size) if len(stages) > 1 else 0.0)
        for start in range(0, prompt, engine.PREFILL_CHUNK):
            stop = min(start + engine.PREFILL_CHUNK, prompt)
            of = partial(
                forward_time,
                hardware=self.hardware,
                batch_size=num_rows,
                num_positions=stop - start,
                num_scored=1,
                bucket=bucket_of(stop, self.spec.num_slots, self.hardware),
            )
            of_stages = []
            for stage in stages:
                of_stages.append(of(stage).total_s)
                if self.spec.device == "cuda":
                    work, launches = (of(replace(stage, cuda_graphs=graphs)) for graphs in (True, False))
                    of_stages[-1] = max(work.total_s, launches.operators_s)
            if len(stages) > 1:
                of_stages = [seconds + self.hops_s(num_rows * (stop - start)) / len(stages) for seconds in of_stages]
            seconds += max(of_stages) if start else sum(of_stages)
        return seconds

    def draw_s(self, placement: ModelPlacement) -> float:
        """Drawing a token from the logits of each row."""
        numbers = self._rows_of(placement) * self.spec.target.shape.vocab_size
        return self._kernels_s(self.spec.kernels.draw, RULE_PASSES, numbers / placement.num_drawn_parts)

    def rule_s(self, num_positions: int) -> float:
        """The rule on `num_positions` of each row that a rank verifies."""
        numbers = self._rows_of(self.draft or self.target) * num_positions * self.spec.target.shape.vocab_size
        rule = rule_of(self.spec.rule)
        num_kernels, num_passes = self.spec.kernels.verify + rule.more_kernels, RULE_PASSES + rule.more_passes
        return self._kernels_s(num_kernels, num_passes, numbers / self.target.num_drawn_parts)

    def _kernels_s(self, num_kernels: int, num_passes: int, numbers: float) -> float:
        """Kernels that together make `num_passes` over fp32 numbers."""
        launch_s = self.hardware.kernel_s if self.spec.cuda_graphs else self.hardware.launch_s
        return num_kernels * launch_s + num_passes * 4 * numbers / self.hardware.read_bytes_per_s

    def agree_s(self, num_draft_tokens: int, *kinds: str) -> float:
        """Seconds of the messages of a round between the ranks of a replica, one after the other."""
        found = round_messages(self.spec, num_draft_tokens)
        sent = [found[kind] for kind in kinds if kind in found]
        return sum(message_s(self.hardware, message.ranks, message.num_bytes) for message in sent)

    def plain_s(self) -> float:
        """One plain token."""
        drawn_s = self.forward(self.target, 1).total_s + self.draw_s(self.target)
        return drawn_s + self._kernels_s(self.spec.kernels.plain, 0, 0) + self.agree_s(0, "verdict")

    def draft_step_s(self, num_positions: int) -> float:
        """One draft forward and its draw."""
        assert self.draft, "priced only where there is a draft"
        more_s = self._kernels_s(self.spec.has_head * self.spec.kernels.head, 0, 0)
        return self.forward(self.draft, num_positions).total_s + self.draw_s(self.draft) + more_s

    def verdict_s(self, num_draft_tokens: int) -> float:
        """The rule of a round, and the messages before and after it."""
        messages_s = self.agree_s(num_draft_tokens, "taps", "ids", "probabilities", "verdict")
        return messages_s + self.rule_s(num_draft_tokens + 1)

    def drafting_s(self, num_draft_tokens: int) -> float:
        """Seconds of all draft steps of a round, or of a draft without a model.

        The first step finds the caches as the target has left them, so it may read more tokens than later ones.
        """
        free_s = self._free_s(num_draft_tokens) if num_draft_tokens and self.spec.free_settings else 0.0
        if not (self.draft and num_draft_tokens):
            return free_s
        first_s, later_s = self._draft_steps_s
        first_s += self._copied_s(self.spec.num_kept or 0, self.draft, self._rows_of(self.draft))
        if tree := self.spec.tree:
            later = self.spec.later_draft_forwards(num_draft_tokens)
            forwards_s = sum(self.forward(self.draft, nodes).total_s for nodes in later)
            num_draws = sum(tree.read) if self.spec.is_certain else num_draft_tokens - 1
            return first_s + forwards_s + num_draws * self.draw_s(self.draft)
        return first_s + (num_draft_tokens - 1) * later_s + free_s

    def _free_s(self, num_draft_tokens: int) -> float:
        """The work of a draft without a model; see `DraftTerms`."""
        spec = replace(self.spec, num_draft_tokens=num_draft_tokens)
        terms = spec.free_terms
        free_s = self._kernels_s(terms.num_kernels, 0, 0) + terms.read_bytes / self.hardware.read_bytes_per_s
        if spec.record.draws:  # from a whole law
            numbers = spec.batch_size * spec.vocab_size
            free_s += num_draft_tokens * self._kernels_s(spec.kernels.draw, RULE_PASSES, numbers)
        if self.own_part is None:
            return free_s
        forwards_s = sum(
            forward_time(
                self.own_part,
                self.hardware,
                batch_size=spec.batch_size,
                num_positions=number,
                num_scored=number,
                bucket=terms.seen_slots or self._bucket,
            ).total_s
            for number in self._own_forwards(num_draft_tokens)
        )
        copied_s = self._copied_s(terms.copied_slots, self.own_part, spec.batch_size)
        return free_s + copied_s + forwards_s

    def _own_forwards(self, num_draft_tokens: int) -> tuple[int, ...]:
        """Positions per row in the forwards of the target's own layers that draft a round."""
        return 1, *self.spec.later_draft_forwards(num_draft_tokens)

    def _copied_s(self, num_slots: int, placement: ModelPlacement, num_rows: int) -> float:
        """A copy of some slots of each row."""
        copied_bytes = num_rows * num_slots * placement.model.slot_bytes(placement.most_heads[1])
        return 2 * copied_bytes / self.hardware.read_bytes_per_s

    @cached_property
    def _draft_steps_s(self) -> tuple[float, float]:
        """The first draft step of a round, and each later one."""
        assert self.draft, "priced only where there is a draft"
        first_s = self.draft_step_s(self.spec.first_draft_positions)
        if not self.spec.drafts_in_one_pass:
            return first_s, self.draft_step_s(1)
        model = self.draft.model
        read = model.shape.markov_size // 2  # its other half is an embedding
        joined_s = read * DTYPE_BYTES[model.dtype] / self.hardware.read_bytes_per_s
        return first_s, joined_s + self.draw_s(self.draft)

    def overlapped(self, num_draft_tokens: int) -> OverlappedTime:
        """A round in which drafting overlaps the target's forward of K positions."""
        exchange_s = self.agree_s(num_draft_tokens, "ids", "probabilities")
        verdict_s = self.agree_s(num_draft_tokens, "verdict") + self.rule_s(num_draft_tokens + 3)
        return OverlappedTime(
            draft_s=self.drafting_s(num_draft_tokens),
            forward_s=self.forward(self.target, num_draft_tokens).total_s,
            exchange_s=exchange_s,
            verdict_s=verdict_s,
            hides_exchange=self.spec.device == "cuda",
        )

    def verify_s(self, num_draft_tokens: int) -> float:
        """Device time of a round after drafting."""
        return self.forward(self.target, num_draft_tokens + 1).total_s + self.verdict_s(num_draft_tokens)

    def scoring_s(self) -> float:
        """Reading all rows once more, for log-probabilities; 0 without."""
        tokens = self.spec.prompt_tokens + self.spec.max_new_tokens
        positions = min(self.spec.scored_positions, tokens)
        return -(-tokens // positions) * self.forward(self.target, positions).total_s if positions else 0.0


def bubble(costs: CostModel, num_positions: int) -> float:
    """The share of a step in which an average rank waits for other stages; draws and drafts do not count."""
    stages_s = costs.stages_s(num_positions)
    return 1 - sum(stages_s) / len(stages_s) / costs.forward(costs.target, num_positions).total_s


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds and ratios; the draft's are None without one.

    Attributes:
        target_forward, verify_forward: the target's forward of one token per row, and of K + 1.
        draft_forward_s: a draft forward of one token, including its draw.
        prefill_s: the prompt through the target and the draft, which is the time to the first token.
        plain_prefill_s: through the target alone.
        num_draft_tokens: K of the round that is priced, where rounds choose by `LengthChooser.priced`.
        plain_s, speculative_s: per token, while decoding.
        plain_run_s, speculative_run_s: per token of a completion, including the prompt and an unfinished last round.
        verify_s: the target's forward, rule and messages of a round; overlapped, while the draft drafts.
        speedup: plain over speculative, while decoding.
        cost_ratio: c, a draft step over a plain target step.
        by_num_draft_tokens: speculative seconds per token for K = 1, 2, ...
        best_num_draft_tokens: the fastest K; None for trees, as are figures of other K.
        tokens_per_round_range, best_num_draft_tokens_range: what follows from the low and from the high acceptance, the
            smaller figure first; None for a single figure of it.
        speculative_s_range: what follows from the range of the acceptance, if it has one, and from `error`.
        speedup_range: the same, and from `GAINS`, smaller first.
        error: factors of times while decoding, an 80 % range not below the physical limit; see `decoding_error`.
        overlap: of a spec whose drafting overlaps verification; see `OverlappedTime.document`.
        limit_share: the physical limit, reading what a plain step must read (`least_bytes`) at the data sheet's
            bandwidth, over plain decoding.
    """

    target_forward: ForwardTime
    verify_forward: ForwardTime | None = None
    draft_forward_s: float | None = None
    prefill_s: float
    plain_prefill_s: float
    plain_s: float
    plain_run_s: float
    limit_share: float
    acceptance: Acceptance | None = None
    num_draft_tokens: int | None = None
    tokens_per_round: float | None = None
    round_s: float | None = None
    verify_s: float | None = None
    speculative_s: float | None = None
    speculative_run_s: float | None = None
    speedup: float | None = None
    cost_ratio: float | None = None
    by_num_draft_tokens: tuple[float, ...] = ()
    best_num_draft_tokens: int | None = None
    tokens_per_round_range: tuple[float, float] | None = None
    speculative_s_range: tuple[float, float] | None = None
    speedup_range: Ends | None = None
    best_num_draft_tokens_range: tuple[int, int] | None = None
    error: Ends | None = None
    overlap: dict[str, Any] | None = None

    @property
    def plain_s_range(self) -> Ends | None:
        """The 80 % range of `plain_s`."""
        return self.error and times(self.plain_s, self.error)

    @property
    def prefill_s_range(self) -> Ends | None:
        """The 80 % range of `prefill_s`."""
        return self.error and times(self.prefill_s, FIRST)

    @property
    def knows_best_k(self) -> bool:
        """Whether a plan may recommend `best_num_draft_tokens`."""
        return self.acceptance is not None and not self.acceptance.is_forecast

    @property
    def best_s(self) -> float:
        """Seconds per token of the faster mode, while decoding."""
        return self.plain_s if self.speculative_s is None else min(self.plain_s, self.speculative_s)

    @property
    def gains(self) -> bool:
        """Whether the draft gains."""
        return (self.speedup or 0.0) > 1

    @property
    def best_run_s(self) -> float:
        """Seconds per token of a completion in the mode that is faster while decoding, including the prompt."""
        return self.speculative_run_s if self.gains and self.speculative_run_s else self.plain_run_s


def timing(spec: PlanSpec, hardware: HardwareConfig) -> Timing:
    """Forecast the times of a spec. Raises as `memory`."""
    costs = CostModel(spec, hardware)
    plain_s = costs.plain_s()
    prefill_s = costs.prefill_s(costs.target)
    tokens, limit_share = spec.max_new_tokens, costs.least_bytes / hardware.bandwidth_bytes_per_s / plain_s
    error, forward = decoding_error(spec, hardware, plain_s), costs.forward(costs.target, 1)
    if error and guesses_sums(hardware, spec.target_devices):
        share = forward.collectives_s / plain_s
        error = spread(1.0, error, (1 - share / 2, 1 + share))  # half to twice the time
    plain = Timing(
        target_forward=forward,
        prefill_s=prefill_s,
        plain_prefill_s=prefill_s,
        plain_s=plain_s,
        plain_run_s=(prefill_s + (tokens - 1) * plain_s) / tokens,
        error=error and (max(error[0], limit_share), error[1]),
        limit_share=limit_share,
    )
    return _speculative(costs, plain) if spec.drafts else plain


def _speculative(costs: CostModel, plain: Timing) -> Timing:
    spec, chosen = costs.spec, costs.spec.num_draft_tokens
    acceptance = expected_of_spec(spec)
    probability, tree = acceptance.probability, spec.tree
    longest = min((spec.draft and spec.draft.shape.most_drafted) or MOST_DRAFT_TOKENS, MOST_DRAFT_TOKENS)
    lengths = range(chosen, chosen + 1) if tree else range(1, max(longest, chosen) + 1)
    overlapped = [costs.overlapped(number) for number in lengths if spec.overlaps]

    def gains(probability: float) -> Sequence[float]:
        if overlapped:  # a block goes on from the one before, so that its positions are all alike
            return [overlapped_tokens(probability, number) for number in lengths]
        if tree:
            return [acceptance.tokens_of_tree(probability, tree)]
        return acceptance.tokens_by_length(probability, lengths.stop - 1)

    rounds_s = [one.round_s for one in overlapped] or [
        costs.drafting_s(number) + costs.verify_s(number) for number in lengths
    ]

    def by_k(tokens: Sequence[float]) -> tuple[float, ...]:
        return tuple(map(truediv, rounds_s, tokens))

    tokens = gains(probability)
    by_number = by_k(tokens)
    if spec.chooser:
        chosen = spec.chooser.priced({number: by_number[number - 1] for number in spec.lengths})
    goes_on_plainly = spec.chooser is not None and spec.chooser.finds_best
    place = chosen - lengths.start
    expected, speculative_s = tokens[place], by_number[place]
    prefill_s = plain.prefill_s + (costs.prefill_s(costs.draft) if costs.draft else 0.0)
    # Prefill yields the first token; on average the length limit ends the last round halfway.
    decoding_s = max(spec.max_new_tokens - 1 + (expected - 1) / 2, 0) / expected * rounds_s[place]
    if goes_on_plainly and speculative_s > plain.plain_s:
        speculative_s, decoding_s = plain.plain_s, (spec.max_new_tokens - 1) * plain.plain_s
    step_s = costs.draft_step_s(1) if costs.draft else 0.0
    timed = replace(
        plain,
        verify_forward=costs.forward(costs.target, chosen + 1),
        draft_forward_s=step_s,
        prefill_s=prefill_s,
        acceptance=acceptance,
        num_draft_tokens=chosen,
        tokens_per_round=expected,
        round_s=rounds_s[place],
        verify_s=overlapped[place].forward_s + overlapped[place].verdict_s if overlapped else costs.verify_s(chosen),
        speculative_s=speculative_s,
        speculative_run_s=(prefill_s + decoding_s) / spec.max_new_tokens,
        speedup=plain.plain_s / speculative_s,
        cost_ratio=step_s / plain.plain_s,
        by_num_draft_tokens=() if tree else by_number,
        best_num_draft_tokens=None if tree else 1 + by_number.index(min(by_number)),
        overlap=overlapped[place].document(probability, chosen) if overlapped else None,
        speculative_s_range=plain.error and times(speculative_s, plain.error),
        speedup_range=plain.error and times(plain.plain_s / speculative_s, GAINS),
    )
    if acceptance.ends is None:
        return timed
    fewest, most = map(gains, acceptance.ends)
    slow, fast = by_k(fewest), by_k(most)
    most_s = plain.plain_s if goes_on_plainly else math.inf
    by_acceptance = min(fast[place], most_s), min(slow[place], most_s)
    return replace(
        timed,
        tokens_per_round_range=(fewest[place], most[place]),
        speculative_s_range=spread(speculative_s, *filter(None, (by_acceptance, timed.speculative_s_range))),
        speedup_range=spread(
            timed.plain_s / speculative_s,
            (timed.plain_s / by_acceptance[1], timed.plain_s / by_acceptance[0]),
            *filter(None, [timed.speedup_range]),
        ),
        best_num_draft_tokens_range=None if tree else (1 + slow.index(min(slow)), 1 + fast.index(min(fast))),
    )


def decoding_error(spec: PlanSpec, hardware: HardwareConfig, step_s: float) -> Ends | None:
    """Factors of the time per token, an 80 % range of the forecast, for a plain step that takes `step_s`.

    None for measured machines and for CPUs, to which no published speed applies.
    """
    if hardware.is_measured or hardware.device != "cuda":
        return None
    is_packed, has_rows = spec.target.quantization != NO_QUANTIZATION, hardware.gpu.startswith(PUBLISHED_GPUS)
    if not spec.target.is_lean or not spec.target.storage.has_published_times or not (has_rows or not is_packed):
        return FAR
    if not has_rows:
        return OTHER
    if step_s < LEAST_STEP_S:
        return SHORT
    if spec.batch_size > (MOST_PACKED if is_packed else MOST_NEAR):
        return MANY
    return PACKED if is_packed else NEAR


def spread(value: float, *ranges: Ends) -> Ends:
    """The range of a product of independent factors, each with its range around `value`."""
    down, up = (math.hypot(*(math.log(ends[side] / value) for ends in ranges)) for side in (0, 1))
    return value * math.exp(-down), value * math.exp(up)


def times(value: float, factors: Ends) -> Ends:
    """The range of a value, given the range of the factor by which it may be wrong."""
    return value * factors[0], value * factors[1]
