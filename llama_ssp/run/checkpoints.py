"""Finds and checks a run's checkpoints on every rank before any weight is loaded."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llama_ssp.architectures.matrices import DRAFT_WHOLE, WholeParts
from llama_ssp.architectures.model_files import (
    GENERATION_CONFIG_FILE,
    INNER_CONFIGS,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    read_json,
)
from llama_ssp.catalogue import CONFIG_FILE, Dtype, ModelConfig
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.planning.model import number_format
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.ranks.world import World
from llama_ssp.registry import imported
from llama_ssp.run.prompts import reason_of
from llama_ssp.settings.backends import BACKENDS, backend_of
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.draft_heads import DraftHead, head_in_target, heads_in_targets
from llama_ssp.settings.drafters import drafter_of, other_vocabularies, vocabulary_of
from llama_ssp.settings.layout import Layout, lay_out
from llama_ssp.settings.schema import DeviceKind, ExpertParts, RunConfig
from llama_ssp.settings.weights import WEIGHTS
from llama_ssp.storage.stored import kept_format
from llama_ssp.text.messages import said
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import Checkpoint, check_shape, inspect, summary
from llama_ssp.weights.in_memory import WeightsInMemory, as_eos_ids
from llama_ssp.weights.source import WeightSource, storage_of, tap_source


@dataclass(frozen=True, kw_only=True)
class Source:
    """One model of the run, checked but not loaded.

    `origin` is where its weights come from, `dtype` the number format to load it in, None for the files'.
    `generation` has the fields of its generation_config.json, and is None without that file.
    """

    entry: ModelConfig
    origin: WeightSource
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    generation: Mapping[str, Any] | None
    dtype: torch.dtype | None
    precision: Precision


class Loaded(NamedTuple):
    """The parts of a model that the library's user has loaded, which are not read from files."""

    weights: WeightsInMemory | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


_log = logging.getLogger(__name__)
_LEAST_SHARED = 0.9  # Of the smaller vocabulary: reserved tokens may have been renamed.


def find_sources(
    config: RunConfig, world: World, *, loaded: tuple[Loaded, ...] = (Loaded(), Loaded())
) -> tuple[Source, Source | None]:
    """Find and check the target's and the draft's checkpoints, with the same outcome on every rank.

    The first rank of each node downloads missing files. `loaded` is for target and draft. Raises CheckpointError for a
    missing or faulty checkpoint, ConfigError if the tokenizers differ or a model cannot be quantized, and
    PlacementError if one cannot be split over these ranks, or not in its precision.
    """
    layout, num_target_ranks, num_draft_ranks = _num_ranks(config, world)
    backend, device = backend_of(config.placement.target.kind), world.device.type
    entries, weights = [config.model, *filter(None, [config.draft.model])], [own.weights for own in loaded]
    with raise_on_all_ranks(world.comm):
        if config.reads_files and world.ranks.local_rank == 0:
            of_files = [entry for entry, own in zip(entries, weights, strict=False) if not own]
            for entry in [entry for entry in of_files if not head_in_target(entry.name)]:
                hub.resolve(entry)
                hub.resolve_changes(entry)
    with raise_on_all_ranks(world.comm):
        if made := config.source.make:
            origins: list[WeightSource] = imported(made, setting=WEIGHTS.setting)(config, device)
        else:
            in_target = head_in_target(entries[-1].name)
            with_files = zip(entries[:1] if in_target else entries, weights, strict=False)
            origins = _with_head(*(own or _inspect(entry) for entry, own in with_files), in_target=in_target)
        entries = [
            replace(entry, quantization=kept_format(entry.quantization, storage_of(origin), where=origin.folder))
            for entry, origin in zip(entries, origins, strict=True)
        ]
        if config.placement.target.experts is ExpertParts.spread and isinstance(files := origins[0], Checkpoint):
            origins[0] = replace(files, shape=replace(files.shape, spreads_experts=True))
        if backend.check:
            check = imported(backend.check, setting=BACKENDS.setting)
            check(world, layout, origins[0].shape, entries[0].quantization)
        num_stages = layout.num_stages
        target = _check(
            entries[0], origins[0], loaded[0].tokenizer, num_target_ranks, device=device, num_stages=num_stages
        )
        draft = None
        if len(entries) > 1:
            draft = _check(entries[1], origins[1], loaded[1].tokenizer, num_draft_ranks, DRAFT_WHOLE, device=device)
        on_device = config_on(config, world)
        check_values(on_device, target.origin.shape, draft.origin.shape if draft else None)
        if copied := copy_of_target(target, config):
            _check(copied[0].entry, copied[0].origin, target.tokenizer, num_target_ranks, device=device)
        _warn_of_heads(target.origin, draft.entry.name if draft else None)
        if draft and not draft.origin.shape.is_head:
            imported(vocabulary_of(config.draft).check, setting="draft")(target, draft)
    return target, draft


def config_on(config: RunConfig, world: World) -> RunConfig:
    """Return the config, with `device=cuda` if this rank computes on a GPU: checks then know what the device lacks."""
    return replace(config, device=DeviceKind.cuda) if world.device.type == "cuda" else config


def copy_of_target(target: Source, config: RunConfig) -> tuple[Source, int] | None:
    """The second copy of a target that a draft asks for, in another storage format, and the number of its layers.

    ConfigError for files that are stored in a format of their own.
    """
    found = drafter_of(config.draft).copies(config.draft, target.origin.shape.num_hidden_layers)
    if found is None:
        return None
    quantization = kept_format(found[0], storage_of(target.origin), where=target.origin.folder)
    precision = replace(target.precision, quantization=quantization)
    return replace(target, entry=replace(target.entry, quantization=quantization), precision=precision), found[1]


def find_update(
    config: RunConfig, world: World, sources: Sequence[Source], given: Sequence[ModelConfig | WeightsInMemory | None]
) -> tuple[Source | None, Source | None]:
    """Find and check new weights for the models of a run, with the same outcome on every rank; None keeps a model's.

    A draft head in the files of its target takes the target's. Raises as `find_sources`, and ConfigError for a model
    with other sizes or settings.
    """
    if backend_of(kind := config.placement.target.kind).by_library:
        raise ConfigError(f"no weights can be replaced with {said('placement.target.kind', kind)}: load another pair")
    _, *num_ranks = _num_ranks(config, world)
    found: list[Source | None] = [None, None]
    with raise_on_all_ranks(world.comm):
        for entry in given if world.ranks.local_rank == 0 else ():
            if isinstance(entry, ModelConfig):
                hub.resolve(entry)
    with raise_on_all_ranks(world.comm):
        if isinstance(entry := given[0], ModelConfig):
            check_values(replace(config, model=replace(entry, shape=config.model.shape)))
        origins: list[WeightSource | None] = [
            _inspect(entry) if isinstance(entry, ModelConfig) else entry for entry in given
        ]
        if len(sources) > 1 and (head := tap_source(sources[1].origin)):
            origins[1] = head.updated(*origins)
        for number, (source, origin) in enumerate(zip(sources, origins, strict=False)):
            if origin is None:
                continue
            quantization = kept_format(source.entry.quantization, storage_of(origin), where=origin.folder)
            _check_alike(("model", "draft")[number], origin, source.origin)
            found[number] = other = _check(
                replace(source.entry, quantization=quantization),
                origin,
                source.tokenizer,
                num_ranks[number],
                DRAFT_WHOLE if number else WholeParts.none,
                device=world.device.type,
            )
            if other.precision != source.precision:
                raise ConfigError(f"{origin.folder} stores its weights in another format than the model that runs")
    return found[0], found[1]


_ANY_VALUE = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "quantization_config"}
"""Fields of a config.json that change no forward, or that are compared otherwise."""


def _check_alike(what: str, new: WeightSource, running: WeightSource) -> None:
    """ConfigError unless two models have the same sizes and settings."""
    fields, before = (origin.config.to_dict() for origin in (new, running))
    odd = [
        f"{name} is {fields.get(name)}, not {before.get(name)}"
        for name in sorted({*fields, *before} - _ANY_VALUE)
        if fields.get(name) != before.get(name)
    ]
    if odd:
        raise ConfigError(
            f"{what}={new.folder} must have the sizes and settings of the model that runs: {summary(odd)}; load it as "
            "another pair"
        )


def _num_ranks(config: RunConfig, world: World) -> tuple[Layout, int, int]:
    """The layout of a replica, and the ranks that share the target and the draft."""
    layout = lay_out(config.placement, world_size=world.comm.size, has_draft=config.draft.model is not None)
    num_target_ranks = 1 if backend_of(config.placement.target.kind).by_library else len(layout.scoring_ranks)
    return layout, num_target_ranks, 1 if layout.splits_batch else len(layout.draft_ranks)


def with_number_formats(config: RunConfig, sources: tuple[Source, Source | None]) -> RunConfig:
    """Fill in the shape of each model, the number format that it is loaded in, and the number format of its files."""

    def filled(source: Source) -> ModelConfig:
        formats = source.dtype or source.origin.dtype, source.origin.dtype
        dtype, stored = (Dtype.find(found) or Dtype.fp32 for found in formats)  # others count as fp32, as in plans
        return replace(source.entry, dtype=dtype, stored_dtype=stored, shape=source.origin.shape)

    target, draft = sources
    config = replace(config, model=filled(target))
    return replace(config, draft=replace(config.draft, model=filled(draft))) if draft else config


def _inspect(entry: ModelConfig) -> WeightSource:
    """Inspect the files of a model, compare them with the shape in its catalogue entry, and apply its changes."""
    checkpoint = inspect(hub.resolve(entry))
    check_shape(entry, checkpoint)
    for change, folder in hub.resolve_changes(entry):
        checkpoint = imported(change.apply, setting=f"model.{change.name}")(checkpoint, folder)
    return checkpoint


def _with_head(
    target: WeightSource, draft: WeightSource | None = None, *, in_target: DraftHead | None = None
) -> list[WeightSource]:
    """The sources of a run, where a draft that is a head is joined with its target; ConfigError for a head alone."""
    if isinstance(target, Checkpoint) and target.head:
        raise ConfigError(f"{target.folder} is a draft head: give it as the draft of its target")
    own = draft.head if isinstance(draft, Checkpoint) else None
    if head := in_target or own:
        draft = imported(head.source, setting="draft")(draft, target)
    for kind in heads_in_targets():
        if draft and not in_target and _has_head(draft, kind) and draft.folder.resolve() == target.folder.resolve():
            raise ConfigError(
                f"{draft.folder} is the target and the draft: draft={kind.name} drafts with its {kind.in_target}"
            )
    return [source for source in (target, draft) if source]


def _warn_of_heads(target: WeightSource, draft: str | None) -> None:
    """Name the heads in a target's files that do not draft for it."""
    for kind in heads_in_targets():
        if _has_head(target, kind) and draft != kind.name:
            words = kind.in_target, target.folder, kind.name
            _log.warning("continuing without the %s of %s, which draft=%s reads", *words)


def _has_head(origin: WeightSource, kind: DraftHead) -> bool:
    """Whether the files of a model have a head of a kind."""
    return isinstance(origin, Checkpoint) and kind.is_in(lambda name: getattr(origin.config, name, None))


def _check(
    entry: ModelConfig,
    origin: WeightSource,
    tokenizer: PreTrainedTokenizerBase | None,
    num_ranks: int,
    whole: WholeParts = WholeParts.none,
    *,
    device: str,
    num_stages: int = 1,
) -> Source:
    """Check a model for `num_ranks` ranks in each stage.

    If `tokenizer` is None, it is read from the model's folder, or for a head from the folder of its target.
    """
    from llama_ssp.models.loading import check_model, with_modules

    dtype = number_format(entry, device=device)
    torch_dtype = None if dtype is Dtype.auto else getattr(torch, dtype.value)
    grouped_bytes = 0 if device == "cpu" else (torch_dtype or origin.dtype).itemsize
    check_model(
        origin,
        num_ranks=num_ranks,
        quantization=entry.quantization,
        whole=whole,
        compiles=device == "cpu",
        grouped_bytes=grouped_bytes,
        num_stages=num_stages,
    )
    if isinstance(origin, Checkpoint) or tap_source(origin):
        origin = with_modules(origin)
    of_texts: WeightSource = getattr(origin, "target", origin)  # a head's target
    folder, file = of_texts.folder, of_texts.folder / GENERATION_CONFIG_FILE
    generation = of_texts.generation if isinstance(of_texts, WeightsInMemory) else None
    if generation is None and file.is_file():
        generation = read_json(file)
    return Source(
        entry=entry,
        origin=origin,
        tokenizer=read_tokenizer(folder) if tokenizer is None else tokenizer,
        eos_ids=find_eos_ids(folder, generation),
        generation=generation,
        dtype=torch_dtype,
        precision=Precision(
            quantization=entry.quantization,
            is_stored=storage_of(origin) is not None,
            cache_dtype=entry.cache_dtype,
        ),
    )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer, and try it as a run will use it.

    If its files name code of their own, tokenizer.json is read instead of running that code.
    """
    found = {name: read_json(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    config = found.get(TOKENIZER_CONFIG_FILE, {})
    is_foreign = config.get("auto_map") and not hasattr(transformers, str(config.get("tokenizer_class")))
    kind: Any = PreTrainedTokenizerFast if is_foreign and TOKENIZER_FILE in found else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.decode(tokenizer("a b").input_ids, skip_special_tokens=True)
    except Exception as error:  # tokenizer files fail in many ways
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read ({_alone(folder) or reason_of(error)}); tokenizer.json and "
            "tokenizer_config.json, as save_pretrained writes them, are required"
        ) from error
    return tokenizer


def _alone(folder: Path) -> str | None:
    """Return why a tokenizer without tokenizer.json cannot be read here; None if its files do not show a reason."""
    if (folder / TOKENIZER_FILE).is_file():
        return None
    if any(folder.glob("tekken*.json")):
        return "tekken.json is Mistral's own layout, which is not read"
    if any(folder.glob("*.model")) and (find_spec("sentencepiece") is None or find_spec("google") is None):
        return "a tokenizer.model alone needs two packages: pip install sentencepiece protobuf"
    return None


def find_eos_ids(folder: Path, generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text, by the rules of transformers; the tokenizer's own do not count.

    If there is a generation config, only its field counts, even if that is missing. Else the field of the model config
    counts, or if that is missing the field of its first inner config.
    """
    if generation is not None:
        return as_eos_ids(generation.get("eos_token_id"))
    content = read_json(folder / CONFIG_FILE)
    inner: dict[str, Any] = next((content[name] for name in INNER_CONFIGS if content.get(name)), {})
    given = content.get("eos_token_id")
    return as_eos_ids(inner.get("eos_token_id") if given is None else given)


def check_same_tokens(target: Source, draft: Source) -> None:
    """Compare the tokenizers; output heads may be padded to different widths, and either may have tokens added."""
    target_ids, draft_ids = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if number := num_disagreeing(target_ids, draft_ids):
        raise ConfigError(
            f"the draft must have the target's vocabulary: of the target's {len(target_ids)} tokens {number} are "
            "missing in the draft's or have another id; choose a draft of the target's family"
            + "".join(f", or give {one.asked}" for one in other_vocabularies())
        )


def num_disagreeing(target_ids: Mapping[str, int], draft_ids: Mapping[str, int]) -> int:
    """Number of tokens that are in both vocabularies with different ids; all of the target's if few are in both.

    If one vocabulary only has more tokens than the other, such as `[PAD]`, the number is 0.
    """
    shared = target_ids.keys() & draft_ids.keys()
    if len(shared) < _LEAST_SHARED * min(len(target_ids), len(draft_ids)):
        return len(target_ids)
    return sum(target_ids[token] != draft_ids[token] for token in shared)
