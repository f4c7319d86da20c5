"""Loads a pair of models into this process."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llama_ssp.api.arguments import (
    drafter_without_model,
    entry_of,
    for_each_model,
    in_format,
    known_arguments,
    member,
    model_drafter,
)
from llama_ssp.api.pair import Pair
from llama_ssp.api.words import in_library_words
from llama_ssp.errors import ConfigError
from llama_ssp.ranks.gpu.devices import selection_kept
from llama_ssp.ranks.world import World, start
from llama_ssp.run.checkpoints import Loaded, find_sources
from llama_ssp.run.decoders import load_models
from llama_ssp.settings.checks import check_docstrings
from llama_ssp.settings.drafters import DraftTokenizer, Matching
from llama_ssp.settings.registry import load_plugins
from llama_ssp.settings.schema import (
    DeviceKind,
    Dtype,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    VerificationConfig,
)
from llama_ssp.settings.tasks import GenerateConfig
from llama_ssp.weights.in_memory import weights_of

_OneDtype = Dtype | torch.dtype | str | None
_OneFormat = str | None
_OneTokenizer = PreTrainedTokenizerBase


@known_arguments
def load(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel | None = None,
    *,
    dtype: _OneDtype | tuple[_OneDtype, _OneDtype] = None,
    quantization: _OneFormat | tuple[_OneFormat, _OneFormat] = None,
    device: DeviceKind | torch.device | str = DeviceKind.auto,
    tokenizer: DraftTokenizer | str | _OneTokenizer | tuple[_OneTokenizer, _OneTokenizer] = DraftTokenizer.same,
    matching: Matching | str = Matching.intersection,
) -> Pair:
    """Load a pair of models into this process.

    Args:
        target: a name of the catalogue, a folder with a checkpoint, the id of a model of the Hugging Face hub, or a
            loaded causal language model of transformers, whose weights are copied.
        draft: the same for the draft, or "ngram"; None decodes with the target alone.
        dtype: number format of both, or a tuple with the target's and the draft's; None for the device's default
            (`planning.spec.number_format`).
        quantization: storage format of the linear layers, of both or as a tuple; None for that of the catalogue.
        device: to compute on: auto, cpu, cuda, cuda:1, or a device of torch.
        tokenizer: `own` allows a draft whose tokenizer is not the target's. A loaded tokenizer is that of both models,
            a tuple of two the target's and the draft's, which is its own if the vocabularies differ; needed with
            loaded models without a folder.
        matching: how the tokens of a draft with its own tokenizer become the target's (`settings.drafters.Matching`).

    Raises:
        ConfigError: an argument has a wrong type or value, a plugin cannot be imported, the vocabularies differ, or
            Python has removed docstrings.
        CheckpointError: a checkpoint is missing or faulty.
        PlacementError: the device is not there, or the family of a model is not supported.
    """
    with in_library_words():
        check_docstrings()
        load_plugins()
        kind, number = _read_device(device)
        choice, tokenizers = _read_tokenizers(tokenizer)
        formats = [*zip(for_each_model(dtype), for_each_model(quantization), strict=True)]
        target_entry, loaded_target = _read_model("target", target, tokenizers[0], *formats[0])
        drafter, loaded_draft = drafter_without_model(draft), Loaded()
        if drafter is None:
            draft_entry, loaded_draft = _read_model("draft", draft, tokenizers[1], *formats[1])
            drafter = model_drafter(draft_entry, tokenizer=choice, matching=matching)
        config = RunConfig(
            task=GenerateConfig(), model=target_entry, draft=drafter, placement=PlacementConfig(),
            sampling=SamplingConfig(), verification=VerificationConfig(), device=kind,
        )  # fmt: skip
        with selection_kept(), start(device=kind, timeout_s=config.timeouts.load_s) as started:
            if started.comm.size > 1:
                message = "the library works in one process: use llama-ssp run with ranks=N for several"
                raise ConfigError(message)
            world = _on_gpu(number, started)
            sources = find_sources(config, world, loaded=(loaded_target, loaded_draft))
            return Pair(models=load_models(config, world, sources), config=config)


def _read_model(
    what: str, given: object, tokenizer: PreTrainedTokenizerBase | None, dtype: object, quantization: object
) -> tuple[ModelConfig, Loaded]:
    if not isinstance(given, torch.nn.Module):
        return entry_of(what, given, dtype=dtype, quantization=quantization), Loaded(tokenizer=tokenizer)
    weights = weights_of(given, what=what)
    if tokenizer is None and not weights.folder.is_dir():
        raise ConfigError(
            f"{what} is a loaded {type(given).__name__} without a folder that has its tokenizer: give tokenizer=, "
            "such as AutoTokenizer.from_pretrained(...)"
        )
    entry = in_format(ModelConfig(name=weights.name), dtype=dtype, quantization=quantization)
    return entry, Loaded(weights=weights, tokenizer=tokenizer)


def _read_device(given: object) -> tuple[DeviceKind, int | None]:
    """The kind of device, and the number of a GPU if one is named."""
    if isinstance(given, DeviceKind):
        return given, None
    name, _, number = str(given).partition(":")
    kind = member(DeviceKind, "device", name)
    if not number:
        return kind, None
    num_gpus = torch.cuda.device_count()
    if kind is not DeviceKind.cuda or not number.isdecimal() or int(number) >= num_gpus:
        gpus = ["cuda", *(f"cuda:{index}" for index in range(num_gpus))] if num_gpus else []
        raise ConfigError(f"device={given} is not on this machine, which has {', '.join(['auto', 'cpu', *gpus])}")
    return kind, int(number)


def _on_gpu(number: int | None, world: World) -> World:
    """The world on the GPU that was named."""
    if number is None:
        return world
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return replace(world, device=device)


def _read_tokenizers(
    given: object,
) -> tuple[DraftTokenizer, tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]]:
    """Whether the draft may have its own tokenizer, and the tokenizers that are loaded already."""
    if isinstance(given, PreTrainedTokenizerBase):
        return DraftTokenizer.same, (given, given)
    target, draft = for_each_model(given)
    if isinstance(target, PreTrainedTokenizerBase) and isinstance(draft, PreTrainedTokenizerBase):
        has_own = target.get_vocab() != draft.get_vocab()
        return DraftTokenizer.own if has_own else DraftTokenizer.same, (target, draft)
    if isinstance(given, str | DraftTokenizer):
        return member(DraftTokenizer, "tokenizer", given), (None, None)
    raise ConfigError(
        f"tokenizer={given!r:.60} must be same, own, a loaded tokenizer of transformers, or a tuple of the target's "
        "and the draft's"
    )
