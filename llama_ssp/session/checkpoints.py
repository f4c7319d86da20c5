"""Finds and checks a run's checkpoints on every rank before any weight is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama_ssp.config.drafters import Matching, matching_of
from llama_ssp.config.folders import read_path
from llama_ssp.config.layout import lay_out_replica, max_device_bytes
from llama_ssp.config.model_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INNER_CONFIGS,
    TOKENIZER_FILES,
    read_json,
)
from llama_ssp.config.schema import Dtype, ModelConfig, RunConfig, TargetKind, WeightsKind, WholeParts
from llama_ssp.distributed.failures import raise_on_all_ranks
from llama_ssp.distributed.world import World
from llama_ssp.drafting.tokenizers import align
from llama_ssp.errors import CheckpointError, ConfigError
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.planning.spec import number_format
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import check_shape, inspect
from llama_ssp.weights.hashes import verify
from llama_ssp.weights.in_memory import WeightsInMemory, as_eos_ids
from llama_ssp.weights.source import WeightSource

if TYPE_CHECKING:  # the library's models take seconds to import
    from llama_ssp.models.huggingface.device_map import Place


@dataclass(frozen=True, kw_only=True)
class Source:
    """One model of the run, checked but not loaded.

    Attributes:
        origin: where its weights come from.
        eos_ids: tokens that end a text; none if its files name none.
        dtype: number format to load it in; None for that of the files.
        precision: storage format of its linear layers.
    """

    entry: ModelConfig
    origin: WeightSource
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    dtype: torch.dtype | None
    precision: Precision


@dataclass(frozen=True, kw_only=True)
class Held:
    """What of a model is in memory already, and is not read from its files."""

    weights: WeightsInMemory | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


_NOTHING = Held()


def find_sources(
    config: RunConfig, world: World, *, held: tuple[Held, Held] = (_NOTHING, _NOTHING)
) -> tuple[Source, Source | None]:
    """Find and check the target's and the draft's checkpoints, with the same outcome on every rank.

    The first rank of each node downloads missing files, and compares them with their manifest. `held` says what of
    target and draft the library's user has loaded. Raises CheckpointError for a missing or faulty checkpoint,
    ConfigError if the tokenizers differ or a model cannot be served or quantized, and PlacementError if one cannot be
    split over this many ranks, or not in its precision.
    """
    layout = lay_out_replica(config.placement, world_size=world.comm.size, has_draft=config.draft.model is not None)
    kind = config.placement.target.kind
    tensor_parallel_size = len(layout.target_ranks) if kind is TargetKind.tensor else 1
    num_ranks = (tensor_parallel_size, 1 if layout.splits_batch else len(layout.draft_ranks))
    wholes = (WholeParts.none, config.placement.draft.whole)
    with raise_on_all_ranks(world.comm):
        if config.weights is WeightsKind.checkpoint and world.ranks.local_rank == 0:
            for entry in [entry for entry, of_user in zip(_entries(config), held, strict=False) if not of_user.weights]:
                folder = hub.resolve(entry)
                if entry.verify:
                    verify(folder, read_path(entry.manifest) if entry.manifest else None)
    with raise_on_all_ranks(world.comm):
        is_synthetic = config.weights is WeightsKind.synthetic
        origins = _synthesize(config, world.device.type) if is_synthetic else _inspect(config, held)
        if kind is TargetKind.deepspeed:
            from llama_ssp.models.huggingface.auto_tp import check_auto_tp, choose_accelerator  # noqa: PLC0415 - slow import

            choose_accelerator(world.device)
            shape, quantization = origins[0].shape, config.model.quantization
            check_auto_tp(shape, quantization=quantization, num_ranks=len(layout.target_ranks))
        target, *drafts = (
            _check(entry, origin, of_user, num_ranks=number, whole=whole, device=world.device.type)
            for entry, origin, of_user, number, whole in zip(
                _entries(config), origins, held, num_ranks, wholes, strict=False
            )
        )
        if kind is TargetKind.accelerate and world.comm.rank in layout.target_ranks:
            from llama_ssp.models.huggingface.device_map import check_device_map  # noqa: PLC0415 - slow import

            place, quantization = device_map_place(config, world), target.entry.quantization
            check_device_map(target.origin, place, dtype=target.dtype, quantization=quantization)
        draft = drafts[0] if drafts else None
        if draft:
            _check_vocabularies(target, draft, matching_of(config.draft))
    return target, draft


def with_number_formats(config: RunConfig, sources: tuple[Source, Source | None]) -> RunConfig:
    """Fill in the number formats that both models are loaded in, those of their files, and unknown shapes."""

    def settled(source: Source) -> ModelConfig:
        dtype, stored = source.dtype or source.origin.dtype, source.origin.dtype
        shape = source.entry.shape or source.origin.shape
        return replace(source.entry, dtype=_member(dtype), stored_dtype=_member(stored), shape=shape)

    target, draft = sources
    config = replace(config, model=settled(target))
    return replace(config, draft=replace(config.draft, model=settled(draft))) if draft else config


def _member(dtype: torch.dtype) -> Dtype:
    """The config's name of a number format; fp32 for a format it lacks, as planning assumes."""
    return next((member for member in Dtype if f"torch.{member.value}" == str(dtype)), Dtype.fp32)


def device_map_place(config: RunConfig, world: World) -> "Place":
    """Where this rank's layer-wise target goes; layers on disk go into this rank's folder in the run folder."""
    from llama_ssp.models.huggingface.device_map import Place  # noqa: PLC0415 - slow import

    target, folder = config.placement.target, offload_folder(config, world)
    max_bytes = max_device_bytes(target)
    return Place(devices=world.free_devices, offload=target.offload, max_bytes=max_bytes, folder=folder)


def offload_folder(config: RunConfig, world: World) -> Path:
    """Folder of this rank's layers on disk during the run."""
    return Path(str(config.run_dir)) / f"offload-{world.comm.rank:03d}"


def _entries(config: RunConfig) -> list[ModelConfig]:
    return [config.model] + ([config.draft.model] if config.draft.model else [])


def _inspect(config: RunConfig, held: tuple[Held, Held]) -> list[WeightSource]:
    """Inspect the files of each model, and compare them with the shape in its catalogue entry."""
    origins: list[WeightSource] = []
    for entry, of_user in zip(_entries(config), held, strict=False):
        if of_user.weights:
            origins.append(of_user.weights)
            continue
        checkpoint = inspect(hub.resolve(entry))
        check_shape(entry, checkpoint)
        origins.append(checkpoint)
    return origins


def _synthesize(config: RunConfig, device: str) -> list[WeightSource]:
    """Make the synthetic weights of each model; on a CPU 16 bits hold their numbers, as planned."""
    from llama_ssp.weights.synthetic import synthesize  # noqa: PLC0415 - few runs need it

    shapes = [entry.shape for entry in _entries(config) if entry.shape]
    return list(synthesize(shapes, agreement=config.synthetic.agreement, in_16_bits=device == "cpu"))


def _check(
    entry: ModelConfig, origin: WeightSource, of_user: Held, *, num_ranks: int, whole: WholeParts, device: str
) -> Source:
    from llama_ssp.models.loading import check_model  # noqa: PLC0415 - slow import

    compiles = device == "cpu" and not entry.int8_threshold
    check_model(origin, num_ranks=num_ranks, quantization=entry.quantization, whole=whole, compiles=compiles)
    dtype = number_format(entry, device=device)
    tokenizer = _read_tokenizer(origin.folder) if of_user.tokenizer is None else of_user.tokenizer
    return Source(
        entry=entry,
        origin=origin,
        tokenizer=tokenizer,
        eos_ids=of_user.weights.eos_ids if of_user.weights else read_eos_ids(origin.folder),
        dtype=None if dtype is Dtype.auto else getattr(torch, dtype.value),
        precision=Precision(quantization=entry.quantization, int8_threshold=entry.int8_threshold),
    )


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read a tokenizer, and try it as a run will use it."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            read_json(folder / name)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.decode(tokenizer("a b").input_ids, skip_special_tokens=True)
    except Exception as error:  # tokenizer files fail in many ways
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read ({reason}); tokenizer.json and tokenizer_config.json, as "
            "save_pretrained writes them, are required"
        ) from error
    return tokenizer


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text, as transformers finds them, whatever the tokenizer names.

    A generation config alone says so, even by silence. Without one the model config does: its own field, else that of
    the inner config that comes first.
    """
    file = folder / GENERATION_CONFIG_FILE
    if file.is_file():
        return as_eos_ids(read_json(file).get("eos_token_id"))
    content = read_json(folder / CONFIG_FILE)
    inner: dict[str, Any] = next((content[name] for name in INNER_CONFIGS if content.get(name)), {})
    given = content.get("eos_token_id")
    return as_eos_ids(inner.get("eos_token_id") if given is None else given)


def _check_vocabularies(target: Source, draft: Source, matching: Matching | None) -> None:
    """Compare the tokenizers; output heads may be padded to different widths."""
    target_ids, draft_ids = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if target_ids == draft_ids and matching:
        raise ConfigError(
            f"draft.tokenizer=own has no effect with draft={draft.entry.name}, which has the target's tokenizer: "
            "leave it out"
        )
    if matching is Matching.intersection:
        _check_intersection(target, draft)
    elif target_ids != draft_ids and not matching:
        num_shared = len(target_ids.items() & draft_ids.items())
        raise ConfigError(
            f"the draft must have the target's vocabulary: of the target's {len(target_ids)} tokens the draft has "
            f"{num_shared} with the same id; choose a draft of the target's family, or give draft.tokenizer=own"
        )


def _check_intersection(target: Source, draft: Source) -> None:
    sizes = {"target_size": target.origin.shape.vocab_size, "draft_size": draft.origin.shape.vocab_size}
    if not align(target.tokenizer, draft.tokenizer, **sizes).num_shared:
        raise ConfigError(
            f"draft.matching=intersection drafts the tokens that both vocabularies have, and draft={draft.entry.name} "
            f"shares none with model={target.entry.name}: give draft.matching=text"
        )
