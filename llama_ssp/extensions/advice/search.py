"""`search=true`: ranks the uses of a machine by speed, over models, precisions, drafts, layouts and K.

The asked model comes first, then the smaller ones of its series, the largest first; each is tried in every precision,
with every draft of its vocabulary and the best K. Choices that do not fit come last. A setting of the command line is
never varied.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

from llama_ssp import catalogue
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import PlacementError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.acceptance import expected_of_spec
from llama_ssp.planning.layouts import layouts
from llama_ssp.planning.memory import RankMemoryPlan, fits, fullest_rank
from llama_ssp.planning.model import PlannedModel, planned_model
from llama_ssp.planning.plan import PLAN_VERSION, basis
from llama_ssp.planning.spec import PlanSpec, on_block, spec_of_plan, without_draft
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.run.tasks import dry_run
from llama_ssp.settings.drafters import SAME
from llama_ssp.settings.extensions import MORE
from llama_ssp.settings.lengths import finder
from llama_ssp.settings.rules import AT_ZERO, DEFAULT
from llama_ssp.settings.schema import DraftLayout, PlanConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.storage.formats import NO_QUANTIZATION, format_of, formats
from llama_ssp.text.messages import value_of

MOST_NODES = 4
"""The most nodes that are tried if one has too little room."""
TREES = tuple(map(tree_shape, ("2x1x1", "2x2x1", "3x2x1x1", "4x2x2x1x1")))
FEW_ROWS = 4
"""Trees that a search tries for heads without a known tree, and the most rows that it tries trees for: each row has a
tree of its own."""


@cache
def _of_searches() -> tuple[str, ...]:
    """Return the names of settings that only a search has, so that the plan of a choice must not have them."""
    return ("search", "format", *(name for more in MORE.all().values() if more.draw for name in more.paths))


def placement_settings(spec: PlanSpec) -> list[str]:
    """The settings that place a spec like this one, for `llama-ssp plan` and `run` alike."""
    settings = [] if spec.num_replicas == 1 else [f"placement.num_replicas={spec.num_replicas}"]
    if spec.num_stages > 1:
        settings.append(f"placement.target.stages={spec.num_stages}")
    if spec.draft is None:
        return settings
    settings.append(f"placement.draft.kind={spec.draft_kind.name}")
    if spec.overlap:
        settings.append(f"speculation.overlap={value_of(spec.overlaps)}")
    num_default = {DraftLayout.one_rank: 1, DraftLayout.own_gpu: 1}.get(spec.draft_kind, len(spec.layout.scoring_ranks))
    if len(spec.draft_ranks) != num_default:
        settings.append(f"placement.draft.tp_size={len(spec.draft_ranks)}")
    return settings


def moved(spec: PlanSpec, other: PlanSpec) -> list[str]:
    """Return the settings that place the draft of `other`; none if the spec's draft is placed alike."""
    is_same = other.draft_kind is spec.draft_kind
    return [] if is_same else placement_settings(replace(other, num_replicas=1))


def by_length(spec: PlanSpec, timed: Timing) -> Iterator[tuple[float, PlanSpec]]:
    """Yield seconds per token and the spec for every K, the fastest first; nothing without a draft.

    If no K can be recommended, the spec with `num_draft_tokens=auto` comes first, or with overlap that with its own K.
    """
    times = timed.by_num_draft_tokens
    if times and spec.overlaps and not timed.knows_best_k:  # overlap needs one K for all rounds
        yield times[spec.num_draft_tokens - 1], replace(spec, chooser=None)
        return
    if times and (chooser := finder()) and not timed.knows_best_k:
        lengths = chooser.lengths(spec.draft.shape if spec.draft else None)
        token_s = min(timed.plain_s, *(times[number - 1] for number in lengths))
        yield token_s, replace(spec, num_draft_tokens=max(lengths), chooser=chooser)
    by_time = sorted((token_s, number) for number, token_s in enumerate(times, start=1))
    yield from ((token_s, replace(spec, num_draft_tokens=number, chooser=None)) for token_s, number in by_time)


def length_setting(spec: PlanSpec) -> str:
    """The setting of a spec's K, or of its trees."""
    if spec.tree:
        return f"speculation.tree={spec.tree.text}"
    return f"speculation.num_draft_tokens={spec.length}"


def priced(spec: PlanSpec, machine: HardwareConfig, *, given: Collection[str] = ()) -> tuple[PlanSpec, dict[str, Any]]:
    """Price a spec with the best K that fits, and without CUDA graphs where no K has room for them.

    `given` are keys of settings that stay as they are. Returns the spec with its figures, or with why it is ruled out.
    """
    try:
        full = asked = fullest_rank(spec, machine)
    except PlacementError as error:
        return spec, _figures(spec, machine, reason=str(error))
    keeps_k = "speculation.num_draft_tokens" in given
    if full.fits or (not keeps_k and spec.drafts and fits(replace(spec, num_draft_tokens=1, chooser=None), machine)):
        timed = timing(spec, machine)
        asked_s = timed.plain_s if timed.speculative_s is None else timed.speculative_s
        ways = iter(()) if keeps_k else by_length(spec, timed)
        for token_s, way in chain([next(ways, (asked_s, spec))], ways):
            if (full := fullest_rank(way, machine)).fits:
                if way.draws_over_shards != spec.draws_over_shards:  # ranks exchange other messages
                    token_s = timing(way, machine).speculative_s or token_s  # noqa: PLW2901
                times = {
                    "ms_per_token": 1e3 * token_s,
                    "tokens_per_s": way.num_rows / token_s,
                    "first_token_ms": 1e3 * timed.prefill_s,
                    "speedup": timed.plain_s / token_s,
                }
                return way, _figures(way, machine, full) | times
    if spec.cuda_graphs and "cuda_graphs" not in given and asked.free_bytes + asked.graphs_bytes >= 0:
        return priced(replace(spec, cuda_graphs=False), machine, given=given)
    full = full if asked.fits else asked
    return spec, _figures(spec, machine, full, reason=f"rank {full.rank} needs {full.room}")


def _figures(
    spec: PlanSpec, hardware: HardwareConfig, full: RankMemoryPlan | None = None, *, reason: str | None = None
) -> dict[str, Any]:
    return {
        "target": spec.target.name,
        "quantization": spec.target.weights_name,
        "draft": spec.draft_name,
        "draft_quantization": spec.draft.weights_name if spec.draft else None,
        "draft_kind": spec.draft_kind.name if spec.draft else None,
        "num_draft_tokens": spec.num_draft_tokens if spec.drafts else 0,
        "num_ranks": len(spec.layout.ranks),
        "num_replicas": spec.num_replicas,
        "adapts": spec.drafts and spec.adapts,
        "tree": spec.tree and spec.tree.text,
        "overlaps": spec.overlaps,
        **dict.fromkeys(("ms_per_token", "tokens_per_s", "first_token_ms", "speedup")),
        "needed_bytes": full.needed_bytes if full else None,
        "capacity_bytes": hardware.rank_bytes,
        "is_tight": full is not None and full.is_tight,
        "reason": reason,
    }


def search(spec: PlanSpec, hardware: HardwareConfig, given: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Price all candidates for a spec like this one: the asked model first, then the largest, each the fastest first.

    For each model, candidates that do not fit come last. `given` are the settings of the command line. The page of
    this extension describes the fields of a candidate.
    """
    words = {setting.partition("=")[0].lstrip("+"): setting for setting in given}
    choices = [priced(candidate, hardware, given=words) for candidate in _candidates(spec, hardware, words)]
    asked = _unquantized(spec.target.name)

    def order(choice: tuple[PlanSpec, dict[str, Any]]) -> tuple[Any, ...]:
        name, ms, size = (
            choice[1]["target"],
            choice[1]["ms_per_token"],
            inventory(choice[0].target.shape).num_parameters,
        )
        return name != asked, -size, name, ms or math.inf, choice[1]["num_ranks"]

    return [
        {"rank": rank} | figures | {"settings": _settings(chosen, spec, words)}
        for rank, (chosen, figures) in enumerate(sorted(choices, key=order), start=1)
    ]


def _settings(spec: PlanSpec, asked: PlanSpec, words: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings of the command line, with those that a choice changes replaced by its own."""
    settings: list[str] = []
    replaced = [*_of_searches(), "model.quantization", "draft.model.quantization", "speculation.overlap"]
    if spec.target.name != asked.target.name or "model" not in words:
        replaced, settings = [*replaced, "model"], [*settings, f"model={spec.target.name}"]
    if spec.draft_name != asked.draft_name or "draft" not in words:
        replaced, settings = [*replaced, "draft"], [*settings, f"draft={spec.draft_name or 'none'}"]
    if spec.target.setting != NO_QUANTIZATION:
        settings.append(f"model.quantization={spec.target.setting}")
    if spec.draft and spec.draft.setting != NO_QUANTIZATION:
        settings.append(f"draft.model.quantization={spec.draft.setting}")
    overlap = ["speculation.overlap=true"] if spec.overlaps else []
    settings += overlap if _has(words, "placement") else placement_settings(spec)
    if spec.drafts and not _has(words, "speculation.tree", "speculation.num_draft_tokens"):
        settings.append(length_setting(spec))
    if not spec.drafts:
        replaced.append("speculation")
    if spec.device == "cuda" and not spec.cuda_graphs and "cuda_graphs" not in words:
        settings.append("cuda_graphs=false")
    return *(setting for key, setting in words.items() if not _has({key: setting}, *replaced)), *settings


def _candidates(spec: PlanSpec, hardware: HardwareConfig, words: Mapping[str, str]) -> Iterator[PlanSpec]:
    """Yield every combination of model, precision, draft and layout.

    A layout that lacks room for the target alone is tried without drafts. Entries of the catalogue whose names say that
    they are quantized are left out: they are models that are tried anyway, with a quantization.
    """
    known = catalogue.entries()
    for model in _series(spec.target, known):
        is_asked = model.name == _unquantized(spec.target.name)
        drafted = [*_drafted(spec, model, known, words, is_asked=is_asked)]
        for target in _targets(spec, model, hardware, words, is_asked=is_asked):
            plain = without_draft(replace(spec, target=target))
            num_ranks, node_size = hardware.num_ranks, hardware.num_gpus
            placed = layouts(plain, num_ranks=num_ranks, divides=True, thorough=False, node_size=node_size)
            for base in [plain] if _has(words, "placement") else placed:
                yield base
                for way in drafted if fits(base, hardware) else ():
                    yield from _with_draft(base, way, words)


def _targets(
    spec: PlanSpec, model: ModelConfig, hardware: HardwareConfig, words: Mapping[str, str], *, is_asked: bool
) -> Iterator[PlannedModel]:
    for quantization in [spec.target.quantization] if "model.quantization" in words else formats():
        target = planned_model(replace(model, quantization=quantization), device=hardware.device)
        if is_asked:
            dtype = spec.target.dtype if "model.dtype" in words else target.dtype
            target = replace(target, dtype=dtype, cache_dtype=spec.target.cache_dtype)
        if target.can_be(quantization):
            yield target


def _drafted(
    spec: PlanSpec, model: ModelConfig, known: list[ModelConfig], words: Mapping[str, str], *, is_asked: bool
) -> Iterator[PlanSpec]:
    """Yield the spec with each draft to try: the given one, or the catalogue's drafts for a model."""
    is_given, own = words.get("draft", "draft=default") != "draft=default", spec.draft
    if spec.free_draft:
        yield spec
    drafts = [] if is_given else [planned_model(entry, device=spec.device) for entry in _drafts_of(model, known)]
    if own and own.name not in {draft.name for draft in drafts}:
        is_beyond = not {spec.target.name, own.name} <= set(catalogue.names("model"))
        is_smaller = model.shape and inventory(own.shape).num_parameters < inventory(model.shape).num_parameters
        is_for_it = not own.shape.is_head or own.name in _heads_of(model, known)
        drafts += [own] if (is_asked and (is_given or is_beyond)) or (is_given and is_smaller and is_for_it) else []
    for draft in drafts:
        is_own = own is not None and draft.name == own.name
        tried = [draft] if is_own and "draft.model.quantization" in words else in_formats(draft, device=spec.device)
        for one in tried:
            yield replace(spec, draft=one, free_draft=None, vocabulary=spec.vocabulary if is_own else SAME)


def _with_draft(base: PlanSpec, way: PlanSpec, words: Mapping[str, str]) -> Iterator[PlanSpec]:
    """Yield a placed spec with the draft of `way`, in each placement, with trees and with overlap.

    What the user has set is not varied.
    """
    drafted = replace(way, target=base.target, num_replicas=base.num_replicas)
    if not _has(words, "placement"):
        placed = [*on_block(drafted, len(base.target_ranks), num_stages=base.num_stages)]
    else:
        placed = [drafted] if way.draft is None or way.draft_ranks else []
    for one in placed:
        is_apart = one.draft_kind is DraftLayout.own_gpu
        if one.draft and ((one.overlap and not is_apart) or (one.tree and one.draft_kind is DraftLayout.replicated)):
            continue
        yield one
        if not _has(words, "speculation.tree", "speculation.num_draft_tokens"):
            yield from _with_trees(one)
        keeps_auto = one.adapts and _has(words, "speculation.num_draft_tokens")
        in_turns = one.has_head or one.tree or keeps_auto or _has(words, "speculation.overlap", "draft.fallback")
        if is_apart and one.vocabulary is SAME and not in_turns:
            yield replace(one, overlap=True)


def _has(words: Mapping[str, str], *names: str) -> bool:
    """Whether a setting of one of these names, or below it, was given."""
    return any(key == name or key.startswith(f"{name}.") for key in words for name in names)


def in_formats(plain: PlannedModel, *, device: str) -> Iterator[PlannedModel]:
    """Yield a draft as it is and, unless it is a head, in the storage format that a single row reads fastest."""
    yield plain
    if plain.shape.is_head or format_of(plain.quantization).is_quantized:
        return
    unquantized, columns = 2 * 10**6, [matrix.num_columns for matrix in inventory(plain.shape).layer]
    read_bytes = {
        name: storage.read_bytes(1, storage.packing.matrix_bytes(10**6, 2), unquantized, device=device)
        for name, storage in formats().items()
        if plain.can_be(name) and all(number % storage.packing.least_group == 0 for number in columns)
    }
    fastest = min(read_bytes, key=read_bytes.__getitem__)
    if read_bytes[fastest] < unquantized:
        yield plain.quantized(fastest)


def _with_trees(spec: PlanSpec) -> Iterator[PlanSpec]:
    is_exact = spec.rule in {DEFAULT, AT_ZERO} and not spec.counts_tokens and spec.vocabulary is SAME
    is_placed = spec.draft_kind in {DraftLayout.one_rank, DraftLayout.sharded}
    if spec.drafts and is_placed and is_exact and spec.batch_size <= FEW_ROWS:
        for tree in expected_of_spec(spec).trees or (TREES if spec.has_head else ()):
            yield replace(spec, tree=tree, num_draft_tokens=tree.num_nodes, chooser=None)


def _series(target: PlannedModel, known: list[ModelConfig]) -> list[ModelConfig]:
    """Return the model, and the smaller unquantized ones with the same name prefix (`llama2_`), family and vocabulary.

    A model that is not in the catalogue, but from the hub or a folder, is the only one of its series.
    """
    entry = next((model for model in known if model.name == target.name), None)
    if entry is None or entry.shape is None:
        hub_id = target.name if catalogue.is_hub_id(target.name) else None
        return [
            ModelConfig(
                name=target.name,
                hub_id=hub_id,
                shape=target.shape,
                stored_dtype=target.stored,
                stored_format=target.stored_format,
            )
        ]
    series = {_unquantized(target.name), *catalogue.smaller_relatives(entry, known=known)}
    return [
        other
        for other in catalogue.relatives(entry, known=known)
        if other.name in series and _prefix(other.name) == _prefix(target.name)
    ]


def _unquantized(name: str) -> str:
    return name.removesuffix("_8bit")


def _prefix(name: str) -> str:
    return _unquantized(name).rpartition("_")[0]


def _drafts_of(model: ModelConfig, known: list[ModelConfig]) -> list[ModelConfig]:
    """Return smaller models of the same vocabulary, and the entry's default draft.

    Of several models with equal sizes only one is returned, preferably one of the series. A default draft of the hub is
    left out, since its sizes are unknown until it is downloaded.
    """
    names = {*catalogue.smaller_relatives(model, known=known), *_heads_of(model, known), model.default_draft}
    found: dict[tuple[int, ...], ModelConfig] = {}
    for draft in sorted(known, key=lambda other: _prefix(other.name) != _prefix(model.name)):
        if draft.name in names and draft.shape:
            sizes = (
                draft.shape.num_hidden_layers,
                draft.shape.hidden_size,
                draft.shape.intermediate_size,
                int(draft.shape.is_head),
            )
            found.setdefault(sizes, draft)
    return list(found.values())


def _heads_of(model: ModelConfig, known: list[ModelConfig]) -> Iterator[str]:
    """Yield the names of heads that were trained for a model; for a folder, those for a model of the same sizes."""
    entries = {entry.name: entry for entry in known}
    for other in known:
        if not (model.shape and other.shape and other.shape.is_head) or model.shape.is_head:
            continue
        target = entries.get(other.target or "")
        if target is None:
            sizes = other.shape.target_hidden_size, other.shape.target_vocab_size
            fits = sizes == (model.shape.hidden_size, model.shape.vocab_size)
        else:
            trained_for = other.trained_for or target.hub_id
            fits = target.shape == model.shape and model.hub_id in {None, trained_for}
        if fits:
            yield other.name


@dataclass(frozen=True, kw_only=True)
class Search:
    """The choices that `search` has found for a machine."""

    machine: HardwareConfig
    choices: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        """A JSON document, which the page of this extension describes."""
        return {"plan_version": PLAN_VERSION, "basis": basis(self.machine), "search": self.choices}


def show(config: PlanConfig, machine: HardwareConfig, settings: Sequence[str]) -> None:
    """Print every sensible use of a machine, the asked model first, and draw them; `settings` are the user's.

    Raises ConfigError if a figure cannot be drawn.
    """
    figures = dry_run.figures_of(config)
    found = Search(machine=machine, choices=search(spec_of_plan(config, machine), machine, settings))
    dry_run.show(
        found, found.document, config.format, figures, tables="llama_ssp.extensions.advice.tables:print_search"
    )
