"""Speculative sampling in a notebook: load a pair of models, complete a prompt. No configuration files, one process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch
from transformers.generation.streamers import BaseStreamer

from llama_ssp.config import catalogue
from llama_ssp.config.checks import check_values
from llama_ssp.config.drafts.model import DraftTokenizer, Matching, ModelDraftConfig
from llama_ssp.config.options.hub_ids import is_hub_id
from llama_ssp.config.registry import load_plugins
from llama_ssp.config.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DeviceKind,
    DrafterConfig,
    Dtype,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    VerificationConfig,
)
from llama_ssp.config.tasks.generate import GenerateConfig
from llama_ssp.distributed.world import start
from llama_ssp.engine.state import Request
from llama_ssp.engine.stream import StreamerAdapter
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.session.checkpoints import find_sources
from llama_ssp.session.draft_length import settle_length
from llama_ssp.session.loading import Models, build_decoder, load_models
from llama_ssp.session.prompts import check_ids, encode

_Kind = TypeVar("_Kind", bound=Enum)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its draft in memory, made by `load`."""

    models: Models
    config: RunConfig


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A completion by `speculative_generate`, without its prompt.

    Attributes:
        finish_reason: "length", "eos" or "stop".
        accepted_lengths: for each round, the accepted drafted tokens.
        num_target_forwards: forwards of the target, including the prefill.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    accepted_lengths: list[int]
    num_target_forwards: int


def load(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    dtype: Dtype | str | None = None,
    device: DeviceKind | str = DeviceKind.auto,
    tokenizer: DraftTokenizer | str = DraftTokenizer.same,
    matching: Matching | str = Matching.intersection,
) -> Pair:
    """Load a pair of models into this process.

    Args:
        target: a name of the catalogue, a folder with a checkpoint, or the id of a model of the Hugging Face hub.
        draft: the same for the draft; None decodes with the target alone.
        dtype: number format of both, or its name; None for the device's default (`planning.job`).
        device: to compute on, or its name.
        tokenizer: `own` allows a draft whose tokenizer is not the target's.
        matching: how its tokens then become the target's (`config.drafts.model.Matching`).

    Raises:
        ConfigError: a name is unknown, a plugin cannot be imported, or the vocabularies differ.
        CheckpointError: a checkpoint is missing or faulty.
    """
    load_plugins()
    device = _member(DeviceKind, "device", device)
    dtype = None if dtype is None else _member(Dtype, "dtype", dtype)
    drafter = DrafterConfig(kind=NO_DRAFT)
    if draft is not None:
        drafter = ModelDraftConfig(
            kind=MODEL_DRAFT, model=_entry(draft, dtype),
            tokenizer=_member(DraftTokenizer, "tokenizer", tokenizer), matching=_member(Matching, "matching", matching),
        )  # fmt: skip
    config = RunConfig(
        task=GenerateConfig(), model=_entry(target, dtype), draft=drafter, placement=PlacementConfig(),
        sampling=SamplingConfig(), verification=VerificationConfig(), device=device,
    )  # fmt: skip
    with start(device=device, timeout_s=config.timeouts.load_s) as world:
        if world.comm.size > 1:
            raise ConfigError("the library works in one process: use launch/run.py under torchrun for several ranks")
        models = load_models(config, world, find_sources(config, world))
    return Pair(models=models, config=config)


def speculative_generate(
    pair: Pair,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    num_draft_tokens: int | str = 4,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    chat: bool = False,
    stop_strings: str | Sequence[str] = (),
    streamer: BaseStreamer | None = None,
) -> list[Completion]:
    """Complete prompts, with the distribution of the target alone; returns the completions in order.

    Args:
        pair: from `load`.
        prompts: one or several; several are decoded together.
        max_new_tokens: per prompt.
        num_draft_tokens: K, tokens drafted per round; "auto" chooses K for each round.
        sampling: None samples at temperature 0.8; `SamplingConfig(temperature=0)` is greedy.
        seed: the same seed gives the same text.
        chat: apply the tokenizer's chat template to each prompt.
        stop_strings: texts that end a completion, which keeps them.
        streamer: of transformers, such as TextStreamer; for one prompt only.

    Raises ConfigError if a setting is out of range, or a prompt does not fit into the context.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if streamer and len(texts) != 1:
        raise ConfigError(f"a streamer shows one prompt, and {len(texts)} were given: leave the streamer out")
    if not texts:
        raise ConfigError("at least one prompt is required")
    models = pair.models
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    config = replace(pair.config, sampling=sampling or SamplingConfig(), seed=seed, stop_strings=stops)
    speculation = SpeculationConfig(num_draft_tokens=num_draft_tokens)
    config = replace(config, speculation=speculation, max_new_tokens=max_new_tokens, batch_size=len(texts))
    check_values(config)
    requests = [
        Request(index=index, prompt_ids=encode(text, models.tokenizer, chat=chat), max_new_tokens=max_new_tokens)
        for index, text in enumerate(texts)
    ]
    for text, request in zip(texts, requests, strict=True):
        ids, vocab_size = request.prompt_ids, models.target.vocab_size
        check_ids(ids, max_new_tokens=max_new_tokens, context=models.context, vocab_size=vocab_size, prompt=text)
    decoder = build_decoder(models, config, speculative=models.drafts)
    adapter = StreamerAdapter(streamer, requests[0].prompt_ids) if streamer else None
    done = {}
    with torch.inference_mode():
        if models.drafts:
            decoder.make_room(requests)
            longest = max(len(request.prompt_ids) for request in requests) + max_new_tokens // 2
            settle_length(decoder, config, comm=models.mesh.world, num_slots=longest)
        for updates in decoder.run(requests):
            for update in updates:
                done[update.completion.request.index] = update.completion
                if adapter:
                    adapter.put(update.new_ids)
    if adapter:
        adapter.end()
    return [
        Completion(
            text=str(models.tokenizer.decode(completion.token_ids, skip_special_tokens=True)),
            token_ids=completion.token_ids,
            finish_reason=str(completion.finish_reason),
            accepted_lengths=completion.accepted_lengths,
            num_target_forwards=completion.num_target_forwards,
        )
        for _, completion in sorted(done.items())
    ]


def _member(kind: type[_Kind], what: str, given: _Kind | str) -> _Kind:
    if isinstance(given, kind):
        return given
    if given not in kind.__members__:
        raise ConfigError(unknown_name(what, str(given), kind.__members__))
    return kind[str(given)]


def _entry(model: str | Path, dtype: Dtype | None) -> ModelConfig:
    if isinstance(model, str) and model in catalogue.names() and model != "local":
        entry = catalogue.load(model)
    elif Path(model).is_dir():
        entry = ModelConfig(name="local", path=str(model))
    elif isinstance(model, str) and is_hub_id(model):
        entry = catalogue.load(model)
    else:
        unknown = unknown_name("model", str(model), catalogue.names())
        raise ConfigError(f"{unknown}; a folder works too, and so does owner/name of the hub")
    return entry if dtype is None else replace(entry, dtype=dtype)
