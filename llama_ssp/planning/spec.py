"""The input of the planner, from the config of a plan or of a run, with every choice resolved: models, ranks, sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean
from typing import Any, NamedTuple

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.matrices import DRAFT_WHOLE, WholeParts, tokens_of_a_block, vocabulary_parts
from llama_ssp.architectures.stages import stage_layers
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.model import DTYPE_BYTES, PlannedModel, number_format, planned_model
from llama_ssp.registry import Registry, imported
from llama_ssp.settings import schema
from llama_ssp.settings.backends import TENSOR, Backend, backend_of
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.drafters import (
    DRAFTERS,
    SAME,
    DrafterRecord,
    DraftTerms,
    DraftVocabulary,
    cache_of,
    draft_name,
    drafter_of,
    drafts,
    drafts_greedily,
    of_kind,
    vocabulary_of,
)
from llama_ssp.settings.layout import Layout, lay_out
from llama_ssp.settings.lengths import LengthChooser
from llama_ssp.settings.rules import AT_ZERO, DEFAULT, rule_of
from llama_ssp.settings.schema import DrafterConfig, DraftLayout, ExpertParts, PlanConfig, RunConfig
from llama_ssp.settings.tasks import draws_by_row, task_of
from llama_ssp.settings.trees import TreeShape


class PlannedPair(NamedTuple):
    """A target and a draft, by the names of their models or by the draft's kind, at a temperature and with a rule."""

    target: str
    draft: str
    temperature: float | None
    rule: str


@dataclass(frozen=True, kw_only=True)
class KnownPairs:
    """A source of acceptances of pairs, such as a file of measurements that a setting names.

    Attributes:
        of_run: `module:function` that takes a config, and returns a function from a `PlannedPair` to a
            `planning.acceptance.Acceptance` or None; None if the config names no such source. Raises ConfigError.
    """

    name: str
    order: int = 0
    of_run: str


KNOWN_PAIRS: Registry[KnownPairs] = Registry(setting="known pairs", kind=KnownPairs)
FindAcceptance = Callable[[PlannedPair], Any]


def pairs_known_by(config: RunConfig) -> tuple[FindAcceptance, ...]:
    """The sources of acceptances that a config names, in the order in which they are asked."""
    asked = (imported(one.of_run, setting=one.name)(config) for one in KNOWN_PAIRS.all().values())
    return tuple(filter(None, asked))


@dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """Input of the forecasts of memory and time.

    Attributes:
        target_ranks, draft_ranks: ranks of each replica, increasing.
        num_stages: of the target, among which its ranks are divided evenly.
        layers: numbers of layers of each stage; None shares them out.
        num_groups: of rows that follow each other through the stages; None takes the fastest.
        spare_devices: GPUs without a rank that hold layers of a layer-wise target.
        free_draft: the kind of a draft without a model; None without one.
        free_settings: of a draft without a model, or of a model's fallback where K is chosen.
        vocabulary: of the draft model.
        is_greedy: a draft model's tokens are its most probable ones, without probabilities.
        tree: of a round, with `num_draft_tokens` nodes; None drafts chains.
        chooser: what chooses K for each round, up to `num_draft_tokens`; None for one K.
        overlap: drafting overlaps verification, if the draft has ranks of its own (`overlaps`).
        acceptance: probability that a drafted token is accepted; None takes what is expected of the pair.
        known_by: who knows pairs before the tables of measured ones.
        num_forced: drafted tokens that a round accepts on average, by force; None leaves it to the rule.
        rule: the verification rule; `greedy` at temperature 0, where no probabilities are needed.
        counts_tokens: penalties count the tokens of the vocabulary, or masks forbid some.
        truncates: top-k, top-p or min-p leave few tokens.
        by_row: requests have sampling settings of their own.
        keeps_taps: the task reads taps of all tokens, whatever a head sees of a text.
        scores_texts: the target reads every text once more, for log-probabilities.
        num_samples: rows of a prompt, which is read once for them.
        prompt_tokens, max_new_tokens: tokens of the longest row.
        mean_prompt_tokens: of all prompts, where they are known.
        guesses_tokens: the tokens of the prompts are guesses.
        cuda_graphs: whether forwards are captured; otherwise every operator is launched from Python.
        own_sums: ranks in a node sum by the program's kernel, if the machine's GPUs can.
        equal_bits: GPUs run the kernels of `reproducible=true`, which prompts pay for.
    """

    target: PlannedModel
    draft: PlannedModel | None
    target_ranks: tuple[int, ...]
    draft_kind: DraftLayout
    draft_ranks: tuple[int, ...]
    num_draft_tokens: int
    acceptance: float | None
    batch_size: int
    prompt_tokens: int
    max_new_tokens: int
    cuda_graphs: bool
    device: str
    tree: TreeShape | None = None
    is_greedy: bool = False
    num_replicas: int = 1
    num_samples: int = 1
    mean_prompt_tokens: float | None = None
    guesses_tokens: bool = False
    chooser: LengthChooser | None = None
    num_forced: float | None = None
    overlap: bool = False
    temperature: float | None = None
    rule: str = DEFAULT
    free_draft: str | None = None
    free_settings: DrafterConfig | None = field(default=None, hash=False)
    vocabulary: DraftVocabulary = SAME
    num_kept: int | None = None
    keeps_taps: bool = False
    spare_rows: int = 0
    counts_tokens: bool = False
    truncates: bool = False
    by_row: bool = False
    scores_texts: bool = False
    spare_devices: tuple[int, ...] = ()
    backend: Backend = TENSOR
    num_stages: int = 1
    layers: tuple[int, ...] | None = None
    num_groups: int | None = None
    own_sums: bool = False
    equal_bits: bool = False
    known_by: tuple[FindAcceptance, ...] = ()
    other_kernels: engine.Kernels | None = None

    @property
    def kernels(self) -> engine.Kernels:
        """The kernels of this engine on the device, or of another engine."""
        return self.other_kernels or (engine.CPU_KERNELS if self.device == "cpu" else engine.ENGINE_KERNELS)

    @cached_property
    def drafts(self) -> bool:
        """Whether rounds are speculative."""
        return bool(self.draft or self.free_draft)

    @property
    def draft_name(self) -> str | None:
        """The draft's model, or its kind if it has none; None without a draft."""
        return self.draft.name if self.draft else self.free_draft

    @property
    def pair(self) -> PlannedPair:
        """Target and draft as the key by which acceptances are looked up."""
        return PlannedPair(self.target.name, str(self.draft_name), self.temperature, self.rule)

    @property
    def record(self) -> DrafterRecord:
        """The record of the draft's kind; without a draft, that of draft models."""
        return DRAFTERS.of(schema.MODEL_DRAFT if self.draft else self.free_draft or schema.NO_DRAFT)

    @cached_property
    def is_certain(self) -> bool:
        """Whether drafted tokens have no probabilities."""
        return self.record.is_certain(is_greedy=self.is_greedy, tree=self.tree)

    @property
    def takes_best(self) -> bool:
        """Whether a token is the one with the target's largest logit."""
        return self.rule == AT_ZERO and not (self.counts_tokens or self.by_row)

    @property
    def draft_finds_best(self) -> bool:
        """Whether ranks of the draft exchange their best tokens instead of logits."""
        if self.draft is None or self.tree or self.vocabulary is not SAME:
            return False
        takes_best = self.takes_best or (self.is_certain and not self.counts_tokens)
        return takes_best and self.draft.shape.vocab_size <= self.target.shape.vocab_size

    @cached_property
    def draws_over_shards(self) -> tuple[bool, bool]:
        """See the function."""
        draft = None if self.has_head or self.vocabulary is not SAME else self.draft
        return draws_over_shards(
            self.layout,
            self.backend,
            self.record,
            rule=self.rule,
            takes_best=self.takes_best,
            truncates=self.truncates,
            by_row=self.by_row,
            is_certain=self.is_certain,
            is_chain=not (self.tree or self.overlap),
            num_scored=self.batch_size * self.round_positions,
            vocab_size=self.vocab_size,
            draft_vocab_size=draft.shape.vocab_size if draft else None,
        )

    @cached_property
    def free_terms(self) -> DraftTerms:
        """Costs of a draft without a model; a search may have changed K and the draft."""
        if not (self.free_settings and self.drafts and (self.free_draft or self.adapts)):
            return DraftTerms()
        return drafter_of(self.free_settings).terms(self.free_settings, self)

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.target.shape.vocab_size

    @property
    def num_target_layers(self) -> int:
        """Layers of the target."""
        return self.target.shape.num_hidden_layers

    @property
    def num_rows(self) -> int:
        """Rows of all replicas."""
        return self.batch_size * self.num_replicas

    @cached_property
    def draft_rows(self) -> int:
        """Rows of a rank that drafts and verifies: the batch, or its share of it with a replicated draft."""
        return -(-self.batch_size // len(self.draft_ranks)) if self.layout.splits_batch else self.batch_size

    @property
    def draft_depth(self) -> int:
        """The most drafted tokens that a round accepts."""
        return self.tree.depth if self.tree else self.num_draft_tokens

    @cached_property
    def has_head(self) -> bool:
        """Whether the draft is a head, which reads taps of the target."""
        return self.draft is not None and self.draft.shape.is_head

    @property
    def adapts(self) -> bool:
        """Whether K is chosen for each round."""
        return self.chooser is not None

    @property
    def length(self) -> int | str:
        """K, or the name of what chooses it."""
        return self.chooser.name if self.chooser else self.num_draft_tokens

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The values of K of its rounds, without 0."""
        if self.chooser is None:
            return (self.num_draft_tokens,)
        return self.chooser.lengths(self.draft.shape if self.draft else None)

    @cached_property
    def drafts_in_one_pass(self) -> bool:
        """Whether the draft is a head that drafts all tokens of a round in one forward."""
        return self.draft is not None and record_of(self.draft.shape.model_type).in_one_pass

    def later_draft_forwards(self, num_draft_tokens: int) -> tuple[int, ...]:
        """Positions per row in each of the draft's forwards of a round but the first."""
        if self.drafts_in_one_pass:
            return ()
        return self.tree.read if self.tree else (1,) * (num_draft_tokens - 1)

    @cached_property
    def num_shared_tables(self) -> int:
        """Number of tables of the target that a head reads on the same ranks.

        A head in the lean decoder on one rank shares the embedding; an MTP layer of transformers' modules shares the
        output too.
        """
        target, draft = self.target, self.draft
        if draft is None or not draft.shape.shares_embedding or self.target_ranks != self.draft_ranks:
            return 0
        if self.backend.by_library or target.dtype is not draft.dtype or self.num_stages > 1:
            return 0
        if target.is_lean:
            return int(len(self.target_ranks) == 1)
        return 0 if draft.is_lean or self.layout.splits_batch else 2

    @property
    def draft_whole(self) -> WholeParts:
        """Parts of a draft that every rank holds whole."""
        return WholeParts.none if self.num_shared_tables > 1 else DRAFT_WHOLE

    @cached_property
    def tap_bytes(self) -> int:
        """Bytes of the taps of a token; 0 without a head."""
        if self.draft is None or not self.has_head:
            return 0
        return self.draft.shape.num_taps * self.target.shape.hidden_size * DTYPE_BYTES[self.target.dtype]

    @property
    def hop_bytes(self) -> tuple[int, ...]:
        """Bytes of a token from each stage to the next: its hidden state, and taps of earlier layers."""
        size = self.target.shape.hidden_size * DTYPE_BYTES[self.target.dtype]
        taps = self.draft.shape.taps_of(self.num_target_layers) if self.draft and self.has_head else ()
        return tuple(size * (1 + sum(tap < stage.start for tap in taps)) for stage in self.stages[1:])

    @property
    def sends_taps(self) -> bool:
        """Whether taps travel to the head, whose ranks have no target."""
        return self.has_head and self.layout.is_apart

    @cached_property
    def overlaps(self) -> bool:
        """Whether drafting overlaps verification."""
        return self.overlap and self.draft is not None and self.draft_kind is DraftLayout.own_gpu

    def takes_own_sums(self, hardware: HardwareConfig, ranks: tuple[int, ...]) -> bool:
        """Whether ranks sum by the program's kernel: of a node whose GPUs reach each other's memory."""
        in_node = ranks[0] // hardware.num_gpus == ranks[-1] // hardware.num_gpus
        return self.own_sums and bool(hardware.own_sums) and in_node and 1 < len(ranks) <= engine.OWN_SUM_RANKS

    @cached_property
    def target_devices(self) -> tuple[int, ...]:
        """All devices that hold weights of the target."""
        return (*self.target_ranks, *self.spare_devices)

    @cached_property
    def layout(self) -> Layout:
        """The layout of each replica."""
        return Layout(
            target_ranks=self.target_ranks,
            draft_ranks=self.draft_ranks,
            draft_kind=self.draft_kind,
            num_stages=self.num_stages,
        )

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage of the target; PlacementError if they cannot be shared out."""
        return stage_layers(self.target.shape, self.num_stages, self.layers)

    @cached_property
    def num_slots(self) -> int:
        """Cache slots per row: its tokens and the K + 1, or 2 K, that a round may write beyond them, rounded up."""
        in_flight = self.num_draft_tokens - 1 if self.overlaps else 0
        return engine.whole_steps(self.prompt_tokens + self.max_new_tokens + self.round_positions + in_flight)

    @property
    def draft_slots(self) -> int:
        """Cache slots per row of the draft: more than the target's for a draft with other tokens, up to its context."""
        if self.draft is None:
            return self.num_slots
        if self.num_kept is not None:
            return engine.window_slots(self.num_kept, self.num_draft_tokens)
        context, slots_per_slot = self.draft.shape.max_position_embeddings, self.vocabulary.slots_per_slot
        return engine.draft_slots(self.num_slots, slots_per_slot=slots_per_slot, max_position_embeddings=context)

    @property
    def tap_slots(self) -> int:
        """Slots per row of the taps of a head."""
        if self.num_kept is None or self.keeps_taps:
            return self.num_slots
        return engine.tap_slots(self.num_kept, self.num_draft_tokens, num_slots=self.num_slots)

    @cached_property
    def kept_states(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of states of a row that the target keeps, and those that the draft keeps.

        There is a state after each of the last tokens, which a round may take back, and one more if prompts may be long
        enough for a saved state.
        """
        in_flight, saved = self.num_draft_tokens - 1 if self.overlaps else 0, (1,) * engine.saves_states(self.num_slots)
        return (self.round_positions, *saved), (self.round_positions + in_flight, *saved)

    @cached_property
    def first_draft_positions(self) -> int:
        """Positions per row in the draft's first forward of a round: what its cache may lack."""
        if self.has_head or self.tree:
            return self.draft_depth * (1 + self.drafts_in_one_pass) + 1
        return self.vocabulary.first_positions

    @property
    def scored_positions(self) -> int:
        """Positions per row of a forward that scores texts; 0 without log-probabilities."""
        return engine.scored_positions(self.batch_size, self.target.shape.vocab_size) if self.scores_texts else 0

    @cached_property
    def round_positions(self) -> int:
        """Positions per row in the target's forward of a round: K + 1, or 1 without a draft."""
        return self.num_draft_tokens + 1 if self.drafts else 1


def make_spec(
    config: RunConfig, *, world_size: int, device: str, prompt_tokens: int, num_gpus: int | None = None
) -> PlanSpec:
    """Resolve a checked config for the planner; raises as `planned_model`.

    Args:
        config: of a run or a plan; a task with cells of its own is planned by the largest.
        world_size: number of ranks.
        device: cpu or cuda.
        prompt_tokens: of the longest prompt.
        num_gpus: of a node, None for one per rank. A layer-wise target also uses GPUs that no rank has.
    """
    if largest_cell := task_of(config).largest_cell:
        config, prompt_tokens = largest_cell(config)
    num_gpus = num_gpus or world_size
    placement, speculation, temperature = config.placement, config.speculation, config.sampling.temperature
    acceptance = speculation.acceptance
    if acceptance is None:
        acceptance = config.source.acceptance(config)
    tree = speculation.tree_shape if drafts(config.draft) else None
    fallback, has_model = config.draft.fallback, drafter_of(config.draft).has_model
    free = of_kind(fallback) if fallback and has_model else config.draft

    def planned(model: ModelConfig) -> PlannedModel:
        if config.reads_files:
            return planned_model(model, device=device)
        model = replace(model, dtype=number_format(model, device=device), stored_dtype=Dtype.bf16)
        return replace(planned_model(model, device=device), stored_format=None, quantization=model.quantization)

    target, draft = planned(config.model), planned(config.draft.model) if config.draft.model else None
    spreads = placement.target.experts is ExpertParts.spread
    target = replace(target, shape=replace(target.shape, spreads_experts=spreads))
    layout = lay_out(placement, world_size=world_size, has_draft=draft is not None)
    first = layout.target_ranks[0] // num_gpus * num_gpus
    backend = backend_of(placement.target.kind)
    return PlanSpec(
        target=replace(target, by_library=backend.by_library),
        backend=backend,
        target_ranks=layout.target_ranks,
        num_stages=layout.num_stages,
        layers=tuple(placement.target.layers) if placement.target.layers else None,
        num_groups=placement.target.groups,
        spare_devices=tuple(
            gpu for gpu in range(first, first + num_gpus) if backend.is_layer_wise and gpu not in layout.ranks
        ),
        draft=draft,
        free_draft=None if draft else draft_name(config.draft),
        free_settings=None if drafter_of(free).has_model else free,
        vocabulary=vocabulary_of(config.draft),
        num_kept=kept.num_kept(config.draft) if (kept := cache_of(config.draft)) and draft else None,
        draft_kind=layout.draft_kind,
        draft_ranks=layout.draft_ranks,
        num_replicas=placement.num_replicas,
        num_draft_tokens=config.most_draft_tokens,
        chooser=speculation.chooser,
        is_greedy=drafts_greedily(config.draft),
        tree=tree,
        overlap=speculation.overlap,
        acceptance=acceptance,
        known_by=pairs_known_by(config) if acceptance is None else (),
        num_forced=mean(speculation.forced_lengths) if speculation.forced_lengths else None,
        temperature=temperature,
        rule=config.verification.rule if temperature > 0 else AT_ZERO,
        counts_tokens=config.sampling.penalizes or constraint_asked(config.sampling) is not None,
        truncates=config.sampling.truncates,
        by_row=draws_by_row(config),
        scores_texts=config.scores_texts,
        keeps_taps=task_of(config).keeps_taps,
        batch_size=config.batch_size,
        spare_rows=config.spare_rows,
        num_samples=config.num_samples,
        prompt_tokens=prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        cuda_graphs=config.cuda_graphs and device == "cuda" and not backend.by_library,
        own_sums=config.own_sums and device == "cuda",
        equal_bits=config.reproducible and device == "cuda",
        device=device,
    )


def draws_over_shards(  # noqa: PLR0913 - all that decides it, for plans and runs
    layout: Layout,
    backend: Backend,
    drafter: DrafterRecord,
    *,
    rule: str,
    takes_best: bool,
    truncates: bool,
    by_row: bool,
    is_certain: bool,
    is_chain: bool,
    num_scored: int,
    vocab_size: int,
    draft_vocab_size: int | None,
) -> tuple[bool, bool]:
    """Whether the target's ranks, and the draft's ranks, draw over shards of the vocabulary (`sampling.shards`).

    Ranks that do not draw over shards gather logits. Shards need a target that is split by tensor parallelism, chains,
    and no top-k, top-p or min-p. A rule that compares with probabilities of a draft model needs them in the same
    shards: then both models draw over shards on the same ranks, or neither does. If every rank has the draft's whole
    distribution, the rule reads its own part of it.

    `num_scored` is the number of positions that a round scores in all rows. `draft_vocab_size` is None for a draft with
    other tokens.
    """
    gathers = backend.by_library or takes_best or truncates or by_row or drafter.reads_target or not is_chain
    if gathers or layout.splits_batch or 4 * num_scored * vocab_size < engine.LEAST_SHARED_BYTES:
        return False, False
    record, block = rule_of(rule), tokens_of_a_block(vocab_size)
    target, draft = (
        len(ranks) > 1 and not any(part.start % block for part in vocabulary_parts(vocab_size, len(ranks)))
        for ranks in (layout.scoring_ranks, layout.draft_ranks)
    )
    target = target and (record.over_shards or not record.needs_probs)
    draft = draft and draft_vocab_size == vocab_size and not is_certain
    if record.needs_probs and layout.draft_ranks and not is_certain:
        target = draft = target and draft and layout.draft_ranks == layout.scoring_ranks
    return target, draft


def spec_of_plan(config: PlanConfig, hardware: HardwareConfig) -> PlanSpec:
    """The spec of `llama-ssp plan` on all ranks of a machine; raises as `make_spec`."""
    return make_spec(
        config,
        world_size=hardware.num_ranks,
        num_gpus=hardware.num_gpus,
        device=hardware.device,
        prompt_tokens=config.prompt_tokens,
    )


def block_sizes(most: int) -> list[int]:
    """The sizes of equal blocks that `most` ranks can be divided into, the largest first."""
    return [size for size in range(most, 0, -1) if most % size == 0]


def on_block(spec: PlanSpec, size: int, *, thorough: bool = False, num_stages: int = 1) -> Iterator[PlanSpec]:
    """Yield the spec in each layout of a replica of `size` ranks, whose target has `num_stages` stages of equal size.

    If there are several stages, the draft is on the ranks with the logits. If the number of stages stays as it was, so
    do the layers of each stage.
    """
    layers = spec.layers if num_stages == spec.num_stages else None
    ranks, spec = tuple(range(size)), replace(spec, num_stages=num_stages, layers=layers)
    near = ranks[: size // num_stages]
    if spec.draft is None:
        yield replace(spec, target_ranks=ranks, draft_ranks=())
        return
    yield replace(spec, target_ranks=ranks, draft_kind=DraftLayout.one_rank, draft_ranks=ranks[:1])
    if len(near) == 1:
        return
    for num_ranks in range(2, len(near) + 1) if thorough else [len(near)]:
        yield replace(spec, target_ranks=ranks, draft_kind=DraftLayout.sharded, draft_ranks=ranks[:num_ranks])
    if spec.batch_size > 1:
        yield replace(spec, target_ranks=ranks, draft_kind=DraftLayout.replicated, draft_ranks=near)
    for num_ranks in (range(1, size) if thorough else [1]) if num_stages == 1 else ():
        apart = ranks[-num_ranks:]
        yield replace(spec, target_ranks=ranks[:-num_ranks], draft_kind=DraftLayout.own_gpu, draft_ranks=apart)


def without_draft(spec: PlanSpec) -> PlanSpec:
    """The spec without a draft; ranks that only the draft had become ranks of the target."""
    is_fixed = spec.backend.by_library or spec.num_stages > 1
    ranks = spec.target_ranks if is_fixed else spec.layout.ranks
    return replace(
        spec, draft=None, free_draft=None, vocabulary=SAME, draft_ranks=(), target_ranks=ranks, tree=None, overlap=False
    )
