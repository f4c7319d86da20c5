"""Makes the models on this rank from checked sources, and a decoder from models and settings."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from llama_ssp.architectures.matrices import DRAFT_WHOLE
from llama_ssp.architectures.stages import stage_layers
from llama_ssp.errors import ConfigError
from llama_ssp.models.cache import Taps
from llama_ssp.models.graph_inputs import InPlace
from llama_ssp.models.runner import NullRunner, Runner
from llama_ssp.models.weights import Loading
from llama_ssp.planning.spec import draws_over_shards
from llama_ssp.ranks.comms import Comm, Mesh, build_mesh
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.ranks.stages import ModelStage
from llama_ssp.ranks.world import World, has_own_threads, on_all_cores, on_free_cores
from llama_ssp.registry import imported, operators
from llama_ssp.run.checkpoints import Source, copy_of_target
from llama_ssp.run.requests import RequestMaker
from llama_ssp.settings.backends import BACKENDS, backend_of
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.constraints import constraint_asked
from llama_ssp.settings.drafters import (
    SAME,
    DraftVocabulary,
    cache_of,
    draft_name,
    drafter_of,
    drafts,
    is_certain,
    reads_draft_probs,
    vocabulary_of,
)
from llama_ssp.settings.layout import Layout, lay_out
from llama_ssp.settings.rounds import round_of
from llama_ssp.settings.rules import AT_ZERO
from llama_ssp.settings.schema import DeviceKind, DrafterConfig, RunConfig
from llama_ssp.settings.tasks import task_of
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.drafters.limited import DraftLimit, LimitedDrafter
from llama_ssp.speculate.drafters.maker import make_drafters, tree_of
from llama_ssp.speculate.drafters.shared import BatchSplit
from llama_ssp.speculate.engine.completion import StopRequest
from llama_ssp.speculate.engine.executors import make_executor
from llama_ssp.speculate.engine.held import Reuse
from llama_ssp.speculate.engine.loop import Decoder, RunSettings
from llama_ssp.speculate.engine.masks import Constraint, constraint_of
from llama_ssp.speculate.engine.round import Executor, Round
from llama_ssp.speculate.engine.state import Request
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.speculate.engine.threads import Threads
from llama_ssp.speculate.engine.verifier import Verifier
from llama_ssp.speculate.sampling.rules import ForcedLengths, Rule, make_rule
from llama_ssp.speculate.sampling.shards import WHOLE, Shard
from llama_ssp.speculate.sampling.trees import verify_tree
from llama_ssp.text.messages import key_of, said
from llama_ssp.weights.source import TapSource, tap_source

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models in memory on this rank.

    Attributes:
        target: this rank's slice of the target; on ranks without one, a stand-in that computes nothing.
        draft: the draft or this rank's slice of it; None on ranks without a part of it.
        drafts: whether the run can decode speculatively.
        context: most tokens of prompt and completion together.
        sources: the target's source, and the draft's if there is one.
        vocabulary: the vocabulary that the draft drafts in.
        reuse: how target and draft reuse earlier texts that their caches hold.
        prepared: what the drafter reads besides the models; see `DrafterParts`.
    """

    target: Runner
    draft: Runner | None
    drafts: bool
    mesh: Mesh
    reuse: Reuse
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    context: int
    sources: tuple[Source, ...] = ()
    vocabulary: DraftVocabulary = SAME
    prepared: Any = None

    @property
    def head(self) -> TapSource | None:
        """The draft head, on every rank; None without one."""
        return tap_source(self.sources[-1].origin) if self.sources else None

    def make_taps(self, draft: DrafterConfig | None = None, *, num_drafted: int = 0) -> Taps | None:
        """Make the taps of the target that a draft head will read, on the ranks that keep them; None elsewhere.

        Taps are kept for all tokens, or only for those that a head sees by the settings `draft`, while rounds draft up
        to `num_drafted` tokens.
        """
        head = self.head
        layout = self.mesh.layout
        passes_on = layout.num_stages > 1 and self.mesh.target
        if head is None or not (self.draft or layout.is_apart or passes_on):
            return None
        dtype, width = self.sources[0].dtype or head.target.dtype, head.target.shape.hidden_size
        make: Callable[..., Taps] = Taps
        if draft and (kept := cache_of(draft)):
            make = partial(imported(kept.taps, setting="draft"), draft=draft, num_drafted=num_drafted)
        return make(head.layers, width=width, dtype=dtype, device=self.target.device)

    @property
    def draft_context(self) -> int | None:
        """The context of a draft model that reads the target's tokens, if it is shorter than the target's."""
        if len(self.sources) < 2 or self.vocabulary is not SAME:
            return None
        target, draft = (source.origin.context for source in self.sources)
        return draft if draft < target else None

    @property
    def request_maker(self) -> RequestMaker:
        """Encodes prompts for the target."""
        return RequestMaker(
            tokenizer=self.tokenizer, context=self.context, vocab_size=self.target.vocab_size, eos_ids=self.eos_ids
        )


def load_models(
    config: RunConfig,
    world: World,
    sources: tuple[Source, Source | None],
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> Models:
    """Load this rank's share of the models; raises SspError on every rank if loading fails on one.

    `progress` is called with "target" or "draft", the bytes loaded so far, and all bytes. Afterwards the collectives of
    `world` time out after `timeouts.decode_s`, and its GPUs wait for their replica alone.
    """
    target_source, draft_source = sources
    layout = lay_out(config.placement, world_size=world.comm.size, has_draft=draft_source is not None)
    mesh = _make_mesh(config, layout, world)
    if world.comm.rank == 0:
        _log.info("placement: %s; replicas: %d", layout, config.placement.num_replicas)
    parts = [
        f"the {part}" if comm.size == 1 else f"slice {comm.rank + 1} of {comm.size} of the {part}"
        for part, comm in (("target", mesh.target), ("draft", mesh.draft))
        if comm
    ]
    _log.info("this rank holds %s, in replica %d", " and ".join(parts) or "nothing", mesh.number)
    backend = backend_of(config.placement.target.kind)
    with raise_on_all_ranks(world.comm), on_free_cores(world):
        vocab_size, context = target_source.origin.shape.vocab_size, target_source.origin.context
        target: Runner = NullRunner(device=world.device, vocab_size=vocab_size, max_position_embeddings=context)
        if made := _made_from(mesh, config, target_source, None, device=world.device).get("target"):
            load = imported(backend.load, setting=BACKENDS.setting)
            target = _loaded("target", replace(made, devices=world.free_devices), load, progress)
    target.agree(mesh.replica)
    alone = Models(
        target=target,
        draft=None,
        drafts=False,
        mesh=mesh,
        reuse=Reuse(are_invariant=False, from_states=False),
        tokenizer=target_source.tokenizer,
        eos_ids=target_source.eos_ids,
        context=context,
        sources=(target_source,),
    )
    models = with_draft(alone, config, world, draft_source, progress=progress)
    if config.reproducible and not are_reproducible(models, config):
        raise ConfigError(_why_not_reproducible(models))
    return models


def are_reproducible(models: Models, config: RunConfig) -> bool:
    """Whether the bits of the logits that decide texts depend on no draft, K, batch and number of threads."""
    if reads_draft_probs(config):
        return models.reuse.are_invariant and getattr(models.prepared, "is_invariant", True)  # a copy of the target
    return models.reuse.are_invariant or models.target.is_invariant


def _why_not_reproducible(models: Models) -> str:
    """Say why, where no check of settings and files could know it (`combinations`)."""
    found = "compiled products and attention for all layers of all models, and this machine has none for some of theirs"
    if models.target.device.type != "cpu":
        found = (
            "our kernels for all layers of one rank, in 16 bits on an NVIDIA GPU since A100 (8.0), and this GPU, "
            "number of ranks or model has none for some (a warning says of a kernel why it does not work here)"
        )
    return (
        f"{said('reproducible', True)} needs {found}: the guide to reproducible texts lists instructions, formats and "
        f"sizes; leave it out, or use another {key_of('model.quantization')} or number of ranks"
    )


Progress = Callable[[str, int, int], None]


def with_draft(
    models: Models, config: RunConfig, world: World, source: Source | None, *, progress: Progress | None = None
) -> Models:
    """Load this rank's share of a config's draft, and return `models` with it; raises as `load_models`.

    `source` is None for a drafter without a model.
    """
    mesh, target, sources = models.mesh, models.target, (*models.sources[:1], *filter(None, [source]))
    mesh.set_timeout(config.timeouts.load_s)
    with raise_on_all_ranks(world.comm), on_free_cores(world):
        vocabulary, tokenizers = vocabulary_of(config.draft), [one.tokenizer for one in sources]
        prepare = drafter_of(config.draft).prepare or vocabulary.prepare
        asked = f"draft.kind={config.draft.kind}" if drafter_of(config.draft).prepare else vocabulary.asked
        read = imported(prepare, setting=asked) if prepare else None
        prepared = read(config.draft, *tokenizers) if read else None
        of_target = sources[0] if sources else None
        made, draft = _made_from(mesh, config, of_target, source, device=world.device), None
        if made.keys() & {"prepared", "draft"}:
            from llama_ssp.models.loading import load_model
        if "prepared" in made:
            prepared = _loaded("draft", made["prepared"], load_model, progress)
        if "draft" in made:
            shares = _share(mesh.layout) and not backend_of(config.placement.target.kind).by_library
            draft = _loaded("draft", replace(made["draft"], target=target if shares else None), load_model, progress)
    if draft and mesh.draft:
        draft.agree(mesh.draft)
    mesh.set_timeout(config.timeouts.decode_s)
    world.watch.wait_only_for(mesh.replica_ranks)
    return replace(
        models,
        draft=draft,
        drafts=drafts(config.draft),
        reuse=Reuse.of([target, draft], mesh.replica),
        vocabulary=vocabulary,
        prepared=prepared,
        sources=sources,
    )


def _made_from(
    mesh: Mesh, config: RunConfig, target: Source | None, draft: Source | None, *, device: torch.device
) -> dict[str, Loading]:
    """List what this rank makes of the weights of each model, by field of `Models`.

    Loads and updates follow this list, so that whatever is made from weights is renewed with them.
    """
    make, found = partial(_loading, device=device), dict[str, Loading]()
    if target and mesh.target:
        how = make(target, comm=mesh.target, reproducible=config.reproducible)
        found["target"] = replace(how, stage=_stage_of(mesh, config, target))
        if copied := copy_of_target(target, config):
            source, num_layers = copied
            inner = ModelStage(number=1, num_stages=3, layers=range(num_layers))  # without tables
            how = make(source, comm=mesh.target, reproducible=config.reproducible)
            found["prepared"] = replace(how, stage=inner)
    if draft and mesh.draft:
        # Heads have products outside of the decoder's layers.
        is_ordered = config.reproducible and not draft.origin.shape.is_head
        found["draft"] = replace(make(draft, comm=mesh.draft, reproducible=is_ordered), whole=DRAFT_WHOLE)
    return found


def _loading(source: Source, *, device: torch.device, comm: Comm, reproducible: bool) -> Loading:
    return Loading(
        source.origin,
        label=source.entry.label,
        device=device,
        comm=comm,
        dtype=source.dtype,
        precision=source.precision,
        reproducible=reproducible,
    )


def _loaded(part: str, how: Loading, load: Callable[[Loading], Runner], progress: Progress | None) -> Runner:
    runner = load(replace(how, progress=partial(progress, part) if progress else None))
    _log.info("loaded %s %s", part, how.label)
    return runner


def update_models(
    models: Models, config: RunConfig, world: World, sources: tuple[Source | None, Source | None]
) -> tuple[Models, bool]:
    """Copy new weights of the same shapes into this rank's share of the models; a model whose source is None is kept.

    Afterwards caches count as empty. Raises SspError on every rank if reading fails on one; the models then hold a mix
    of old and new weights.

    Returns:
        The models, and whether all ranks keep their graphs and traces. Ranks do not keep them if new weights need other
        kernels, because such a model is a new object.
    """
    mesh, made = models.mesh, dict[str, Any](vars(models))
    models.target.forget()
    mesh.set_timeout(config.timeouts.load_s)
    with raise_on_all_ranks(world.comm):
        for part, how in _made_from(mesh, config, *sources, device=world.device).items():
            target = made["target"] if part == "draft" and _share(mesh.layout) else None
            made[part] = _updated(made[part], replace(how, target=target))
    is_kept = all(part is before for part, before in zip(made.values(), vars(models).values(), strict=True))
    models, draft_source = Models(**made), sources[1]
    models.target.agree(mesh.replica)
    if models.draft and mesh.draft:
        models.draft.agree(mesh.draft)
    if draft_source and draft_source.origin.shape.is_head:  # later updates may read it again
        models = replace(models, sources=(models.sources[0], draft_source))
    all_keep = all(world.comm.gather_text("kept" if is_kept else ""))
    mesh.set_timeout(config.timeouts.decode_s)
    return replace(models, reuse=Reuse.of([models.target, models.draft], mesh.replica)), all_keep


def _share(layout: Layout) -> bool:
    """Whether a head can read the target's embedding and output: if its ranks have equal parts of both models."""
    return layout.draft_ranks == layout.target_ranks and layout.num_stages == 1


def _stage_of(mesh: Mesh, config: RunConfig, source: Source) -> ModelStage:
    """This rank's stage of the target."""
    layout, given = mesh.layout, config.placement.target.layers
    number = next(place for place, ranks in enumerate(layout.stages) if mesh.replica.rank in ranks)
    origin = source.origin
    if layout.num_stages > 1 and not given:
        from llama_ssp.models.loading import with_modules

        origin = with_modules(origin)
    layers = stage_layers(origin.shape, layout.num_stages, given)[number]
    return ModelStage(
        number=number, num_stages=layout.num_stages, before=mesh.before, behind=mesh.behind, layers=layers
    )


def _updated(runner: Any, how: Loading) -> Runner:  # noqa: ANN401 - one with a dtype
    from llama_ssp.models.loading import load_model

    return load_model(replace(how, dtype=runner.dtype, into=InPlace(runner)))


def _make_mesh(config: RunConfig, layout: Layout, world: World) -> Mesh:
    with on_all_cores(world.cores):
        mesh = build_mesh(layout, world.comm, num_replicas=config.placement.num_replicas)
    if not config.own_sums:
        return mesh
    target, draft = (comm and comm.with_peers() for comm in (mesh.target, mesh.draft))
    return replace(mesh, target=target, draft=draft)


def cuts_of(models: Models, config: RunConfig) -> tuple[bool, bool]:
    """Whether ranks draw from parts of the vocabulary, with the target and with the draft; see `draws_over_shards`."""
    sampling, tree = config.sampling, config.speculation.tree_shape
    if not models.sources:
        return False, False
    has_others = models.sources[-1].origin.shape.is_head or models.vocabulary is not SAME
    return draws_over_shards(
        models.mesh.layout,
        backend_of(config.placement.target.kind),
        drafter_of(config.draft),
        rule=config.verification.rule if sampling.temperature else AT_ZERO,
        takes_best=sampling.takes_best,
        truncates=sampling.truncates,
        by_row=bool(sampling.by_row),
        is_certain=is_certain(config.draft, tree),
        is_chain=not (tree or config.speculation.overlap),
        vocab_size=models.target.vocab_size,
        num_scored=config.batch_size * (1 + config.most_draft_tokens * drafts(config.draft)),
        draft_vocab_size=None if has_others else models.sources[-1].origin.shape.vocab_size,
    )


def _shards_of(models: Models, config: RunConfig) -> tuple[Shard, Shard]:
    """The parts of the vocabulary that this rank draws from, with the target and with the draft."""
    mesh = models.mesh
    scoring = mesh.target if mesh.replica.rank in mesh.layout.scoring_ranks else None
    of_models = zip(cuts_of(models, config), (scoring, mesh.draft), strict=True)
    target, draft = (Shard(comm, models.target.vocab_size) if is_cut and comm else WHOLE for is_cut, comm in of_models)
    return target, draft


def build_decoder(
    models: Models, config: RunConfig, *, speculative: bool, stop_request: StopRequest | None = None
) -> Decoder:
    """Build a decoder from the models and the config; plain decoding uses the target alone.

    Raises ConfigError as `check_values`, whatever its caller has checked.
    """
    device = DeviceKind(models.target.device.type)
    check_values(replace(config, device=device) if config.device is DeviceKind.auto else config)
    parts = _Parts(models, config, speculative=speculative)
    return Decoder(
        parts.round,
        settings=run_settings(models, config, stop_request or StopRequest()),
        executor=parts.executor,
        batch_size=config.batch_size,
        eos_ids=() if config.ignore_eos else models.eos_ids,
        reuse=parts.reuse,
        threads=parts.threads,
        constrain=parts.constrain,
    )


class _Parts:
    """The parts of a decoder. The records of the configured draft, rule and kind of round say how each is made."""

    def __init__(self, models: Models, config: RunConfig, *, speculative: bool) -> None:
        self.models, self.config, self.speculative = models, config, speculative
        self.mesh, self.device = models.mesh, models.target.device
        self.backend = backend_of(config.placement.target.kind)
        self.tree = tree_of(config, self.device) if speculative else None
        self.shards = _shards_of(models, config)

    @cached_property
    def split(self) -> BatchSplit | None:
        """The rows of each rank, where ranks with copies of the draft share the batch."""
        layout = self.mesh.layout
        splits = self.speculative and layout.splits_batch
        return BatchSplit(self.mesh.replica, layout.draft_ranks) if splits else None

    @cached_property
    def taps(self) -> Taps | None:
        """What a draft head reads of the target."""
        if not self.speculative:
            return None
        return self.models.make_taps(self.config.draft, num_drafted=self.config.most_draft_tokens)

    @cached_property
    def rule(self) -> Rule:
        """The rule of the target, with its filters and penalties."""
        return make_rule(
            self.config.sampling,
            self.config.verification,
            is_cut=len(self.mesh.layout.scoring_ranks) > 1 and not self.backend.by_library,
            of_trees=partial(verify_tree, self.tree) if self.tree else None,
            shard=self.shards[0],
        )

    @cached_property
    def drafters(self) -> list[Drafter]:
        """The draft's, and the fallback's where rounds choose; none in plain decoding."""
        if not self.speculative:
            return []
        first, *others = make_drafters(
            self.config,
            mesh=self.mesh,
            target=self.models.target,
            runner=self.models.draft,
            split=self.split,
            taps=self.taps,
            prepared=self.models.prepared,
            shard=self.shards[1],
        )
        _check_bits(first, self.models, self.config)
        if context := self.models.draft_context:
            first = LimitedDrafter(first, DraftLimit(context, self.tree.depth if self.tree else None))
        return [first, *others]

    @cached_property
    def verifier(self) -> Verifier:
        """The verifier: it applies the rule on the ranks that decide, or accepts forced numbers of tokens instead."""
        lengths = self.config.speculation.forced_lengths if self.speculative else []
        if lengths:
            _log.info("not lossless: speculation.forced_lengths=%s says what rounds accept", lengths)
        return Verifier(
            self.rule,
            comm=self.mesh.replica,
            verify_rank=self.mesh.layout.verify_rank,
            device=self.device,
            split=self.split,
            forced=ForcedLengths(lengths, self.device) if lengths else None,
        )

    @cached_property
    def round(self) -> Round:
        """The round of target, drafters and verifier, of the kind that the config asks for."""
        record = round_of(self.config, speculative=self.speculative)
        made: Round = imported(record.make, setting=f"speculation.{record.name}")(
            self.models.target,
            *self.drafters,
            verifier=self.verifier,
            taps=self.taps,
            tree=self.tree,
            has_masks=self.has_masks,
            num_groups=self.config.placement.target.groups or 1,
            holders=self.mesh.holders,
        )
        return made

    @property
    def has_masks(self) -> bool:
        """Whether rows may have constraints."""
        sampling = self.config.sampling
        return bool(sampling.by_row or constraint_asked(sampling))

    @property
    def constrain(self) -> Callable[[Request], Constraint | None] | None:
        """The function that begins the constraint of a request; None if no request may have one."""
        sampling, vocabulary = self.config.sampling, self.models.request_maker.vocabulary
        constraint_of(sampling, vocabulary)  # refused before any text begins

        def begin(request: Request) -> Constraint | None:
            return request.begin() if request.begin else constraint_of(request.sampling or sampling, vocabulary)

        return begin if self.has_masks else None

    @property
    def executor(self) -> Executor:
        """The executor of a round's stages on this device."""
        return make_executor(self.round, cuda_graphs=self.config.cuda_graphs and not self.backend.by_library)

    @property
    def reuse(self) -> Reuse:
        """How new texts reuse what caches hold of earlier ones."""
        kept = cache_of(self.config.draft) if self.speculative and self.models.head else None
        num_seen = kept.num_kept(self.config.draft) if kept else None
        # A round after one without drafts reads taps again from before the last block.
        num_tapped = None if num_seen is None else num_seen + self.config.most_draft_tokens + 1
        return replace(self.models.reuse, num_spare=self.config.spare_rows, num_tapped=num_tapped)

    @property
    def threads(self) -> Threads | None:
        """What chooses the number of threads by trying; None if the number is fixed.

        It is fixed by the user, in replicas of several ranks, and where the bits of texts depend on the number.
        """
        mesh = self.mesh
        is_free = mesh.replica.size == 1 and not has_own_threads(mesh.world.size) and self.models.reuse.are_invariant
        return operators.made("threads", self.device.type, torch.get_num_threads()) if is_free else None


def _check_bits(drafter: Drafter, models: Models, config: RunConfig) -> None:
    """Raise ConfigError on all ranks if the draft's probabilities break `reproducible=true`.

    They do if a rule compares with them and their bits depend on other tokens that are read at once.
    """
    certain = is_certain(config.draft, config.speculation.tree_shape)
    if certain or not (config.reproducible and reads_draft_probs(config)):
        return
    if any(models.mesh.replica.gather_text("" if getattr(drafter, "is_invariant", False) else "varies")):
        raise ConfigError(
            f"{said('reproducible', True)} needs a draft whose probabilities have the same bits beside any tokens, and "
            f"draft={draft_name(config.draft)} with these settings does not say so: use {said('sampling', 'greedy')} "
            f"or {said('verification', 'coupled')}, which do not read them, or another draft"
        )


def run_settings(models: Models, config: RunConfig, stop_request: StopRequest) -> RunSettings:
    """Settings that completions of a config follow, whichever decoder makes them."""
    stops = StopStrings(models.tokenizer, config.stop_strings) if config.stop_strings else None
    return RunSettings(seed=config.seed, stops=stops, stop_request=stop_request, reuses=task_of(config).reuses_prompts)
