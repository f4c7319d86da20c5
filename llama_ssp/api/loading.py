"""Loads a pair: names and formats become settings, on this process, the ranks of its launcher, or ranks of its own."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llama_ssp.api import arguments
from llama_ssp.api.elsewhere import ELSEWHERE
from llama_ssp.api.pair import Pair, check_alike, on_all_ranks
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.errors import ConfigError
from llama_ssp.ranks.gpu import selection_kept
from llama_ssp.ranks.process import check_docstrings
from llama_ssp.ranks.world import World, start
from llama_ssp.registry import imported, load_plugins
from llama_ssp.run.checkpoints import Loaded, find_sources, num_disagreeing, with_number_formats
from llama_ssp.run.decoders import load_models
from llama_ssp.run.pipeline import choose_placement
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.settings.checks import check_effects, check_placement
from llama_ssp.settings.drafters import SAME, DraftVocabulary, other_vocabularies
from llama_ssp.settings.lengths import CHOOSERS
from llama_ssp.settings.schema import DeviceKind, PlacementConfig, RunConfig
from llama_ssp.text.messages import in_library_words
from llama_ssp.weights.in_memory import weights_of

_OneDtype = Dtype | torch.dtype | str | None
_OneTokenizer = PreTrainedTokenizerBase
_log = logging.getLogger(__name__)


@arguments.known_arguments
def load(  # noqa: PLR0913 - a notebook shows this signature
    model: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel | Mapping[str, object] | None = None,
    *,
    dtype: _OneDtype | tuple[_OneDtype, _OneDtype] = None,
    quantization: str | tuple[str | None, str | None] | None = None,
    cache_dtype: str | tuple[str | None, str | None] | None = None,
    device: DeviceKind | torch.device | str = DeviceKind.auto,
    tokenizer: Enum | str | _OneTokenizer | tuple[_OneTokenizer, _OneTokenizer] = SAME.name,
    placement: str | PlacementConfig | None = None,
    ranks: int | None = None,
    spare_rows: int = RunConfig.spare_rows,
    reproducible: bool = RunConfig.reproducible,
) -> Pair:
    """Load a pair of models into this process, or over all ranks of torchrun, srun or `llama-ssp run --script`.

    Args:
        model: the target: a name of the catalogue, a folder with a checkpoint, the id of a model of the Hugging Face
            hub, or a loaded causal language model of transformers, whose weights are copied.
        draft: the same for the draft, "mtp" or "ngram"; a mapping of settings of the draft with its kind or model, such
            as {"kind": "self", "window": 512}, or {"model": "tiny-draft", "fallback": "ngram"} for calls with
            `num_draft_tokens="auto"`; None decodes with the target alone.
        dtype: number format of both, or a tuple with the target's and the draft's; None for the device's default
            (`planning.model.number_format`).
        quantization: storage format of the linear layers, of both or as a tuple; None for the catalogue's.
        cache_dtype: format of keys and values, of both or as a tuple; None for the catalogue's.
        device: to compute on: auto, cpu, cuda, cuda:1, or a device of torch.
        tokenizer: `own` allows a draft whose tokenizer is not the target's. A loaded tokenizer serves both models,
            a tuple of two the target's and the draft's, which is its own if the vocabularies differ; needed with
            loaded models without a folder.
        placement: auto, one_rank, sharded, replicated, own_gpu, or a `PlacementConfig`; None for one_rank.
        ranks: number of processes of this machine to start for the pair, whose calls go to them; None for this
            process, or its launcher's.
        spare_rows: rows of the target's cache that keep texts which have ended, for prompts of later calls and of
            the same one that begin alike.
        reproducible: refuse models whose logits could have other bits with another draft, K, batch or prefix.

    Raises:
        ConfigError: an argument has a wrong type or value, a plugin cannot be imported, the vocabularies differ, or
            Python has removed docstrings.
        CheckpointError: a checkpoint is missing or faulty.
        PlacementError: the device is not there, or the family of a model is not supported.
        LostRankError: a rank did not come, or was lost.
    """
    given = {**locals()}
    with in_library_words():
        check_docstrings()
        read = arguments.check_types(load, {name: given[name] for name in ("ranks", "spare_rows", "reproducible")})
        num_ranks = read.pop("ranks")
        given |= read
        del given["ranks"]
        if num_ranks not in {None, 1}:
            pair: Pair = imported(ELSEWHERE.of("ranks").load, setting="ranks")(num_ranks, given)
            return pair
        load_plugins()
        kind, gpu = _read_device(device)
        vocabulary, tokenizers = _read_tokenizers(tokenizer)
        formats = arguments.formats_of({"dtype": dtype, "quantization": quantization, "cache_dtype": cache_dtype})
        target_entry, loaded_target = _read_model("model", model, tokenizers[0], **formats[0])
        drafter, loaded_draft = arguments.drafter_without_model(draft), Loaded()
        if drafter is None:
            drafted, _ = arguments.draft_of(draft)
            draft_entry, loaded_draft = _read_model("draft", drafted, tokenizers[1], target=target_entry, **formats[1])
            drafter = arguments.draft_model(draft_entry, vocabulary, draft)
        config = RunConfig(
            task=GenerateConfig(),
            model=target_entry,
            draft=drafter,
            device=kind,
            placement=arguments.placement_of(placement),
            **read,
        )
        # `generate` says what chooses K, and a fallback serves the calls that let it.
        chosen = replace(config.speculation, num_draft_tokens=next(iter(CHOOSERS.all()), 1))
        asked = frozenset(f"draft.{name}" for name in arguments.draft_of(draft)[1])
        check_effects(replace(config, speculation=chosen), asked)
        with selection_kept(), start(device=kind, timeout_s=config.timeouts.load_s) as started:
            if gpu and started.comm.size > 1:
                raise ConfigError(f"device={device} is one GPU: device=cuda gives each of the ranks its own")
            if gpu:
                torch.cuda.set_device(gpu)
            world = replace(started, device=gpu or started.device)
            with on_all_ranks(world, "loading", config):
                return _loaded(config, world, (loaded_target, loaded_draft))


def _loaded(config: RunConfig, world: World, loaded: tuple[Loaded, Loaded]) -> Pair:
    comm = world.comm
    check_alike(comm, config)
    check_placement(config, world_size=comm.size)
    if config.placement.num_replicas > 1:
        raise ConfigError("placement.num_replicas shares the prompts of a run: load a pair for each replica")
    if world.note and comm.rank == 0:
        warnings.warn(world.note, stacklevel=4)
    if config.placement.auto:
        config = replace(config, placement=choose_placement(config, world, _log.info))
    sources = find_sources(config, world, loaded=loaded)
    models = load_models(config, world, sources)
    config = with_number_formats(config, sources)
    return Pair(models=models, config=config, world=world, generation=sources[0].generation)


def _read_model(
    what: str, given: object, tokenizer: PreTrainedTokenizerBase | None, *, target: object = None, **formats: object
) -> tuple[ModelConfig, Loaded]:
    if not isinstance(given, torch.nn.Module):
        return arguments.entry_of(what, given, target=target, **formats), Loaded(tokenizer=tokenizer)
    weights = weights_of(given, what=what)
    if tokenizer is None and not weights.folder.is_dir():
        raise ConfigError(
            f"{what} is a loaded {type(given).__name__} without a folder that has its tokenizer: give tokenizer=, "
            "such as AutoTokenizer.from_pretrained(...)"
        )
    entry = arguments.in_format(ModelConfig(name=weights.name), **formats)
    return entry, Loaded(weights=weights, tokenizer=tokenizer)


def _read_device(given: object) -> tuple[DeviceKind, torch.device | None]:
    if isinstance(given, DeviceKind):
        return given, None
    name, _, number = str(given).partition(":")
    kind = arguments.member(DeviceKind, "device", name)
    if not number:
        return kind, None
    num_gpus = torch.cuda.device_count()
    if kind is not DeviceKind.cuda or not number.isdecimal() or int(number) >= num_gpus:
        gpus = ["cuda", *(f"cuda:{index}" for index in range(num_gpus))] if num_gpus else []
        raise ConfigError(f"device={given} is not on this machine, which has {', '.join(['auto', 'cpu', *gpus])}")
    return kind, torch.device("cuda", int(number))


def _read_tokenizers(given: object) -> tuple[DraftVocabulary, tuple[_OneTokenizer | None, _OneTokenizer | None]]:
    """The vocabulary that a draft model drafts in, and the tokenizers that are loaded already."""
    if isinstance(given, str | Enum):
        return arguments.vocabulary_of(given), (None, None)
    target, draft = arguments.for_each_model(given)
    if not (isinstance(target, PreTrainedTokenizerBase) and isinstance(draft, PreTrainedTokenizerBase)):
        raise ConfigError(
            f"tokenizer={given!r:.60} must be same, own, a loaded tokenizer of transformers, or a tuple of the "
            "target's and the draft's"
        )
    has_own = target is not draft and num_disagreeing(target.get_vocab(), draft.get_vocab()) > 0
    return next((one for one in other_vocabularies() if has_own), SAME), (target, draft)
