"""The sampling that a model's generation_config.json asks for, read as transformers' `generate` reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from llama_ssp.errors import ConfigError
from llama_ssp.settings.processors import filters, from_transformers
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.text.messages import key_of, said

_CHANGES_NO_TEXT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "_",
    "max_",
    "use_",
    "cache_",
    "output_",
    "return_",
    "num_return_",
    "num_assistant_",
    "assistant_",
    "is_assistant",
    "prefill_",
    "compile_",
    "disable_compile",
    "prompt_lookup_",
    "continuous_",
    "low_memory",
    "trust_remote_code",
)
"""Beginnings of the names of fields that have no part in the choice of tokens."""


def with_model_sampling(sampling: SamplingConfig, generation: Mapping[str, Any] | None) -> SamplingConfig:
    """Set what `sampling.from_model` lists as a generation config asks for it; raises ConfigError without one."""
    if not sampling.from_model:
        return sampling
    if generation is None:
        whole = said("sampling", "model")
        raise ConfigError(f"{whole} needs generation_config.json, which the model lacks: leave it out")
    asked = _asked(generation)
    return replace(sampling, from_model=[], **{name: asked[name] for name in sampling.from_model})


def with_ids(
    sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase, *, eos_ids: Sequence[int], vocab_size: int
) -> SamplingConfig:
    """Fill in the ids that `bad_words` and `min_new_tokens` stand for.

    Raises ConfigError for ids of `logit_bias` that the model lacks.
    """
    if beyond := [token for token in sampling.logit_bias if not 0 <= token < vocab_size]:
        raise ConfigError(
            f"{key_of('sampling.logit_bias')} names token {beyond[0]}, and the model knows {vocab_size} ids, from 0 on"
        )
    spelled = [text for word in sampling.bad_words for text in (word, f" {word.lstrip()}")]
    words = {tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in spelled}
    return replace(sampling, bad_ids=tuple(sorted(words - {()})), eos_ids=tuple(eos_ids))


def note_on(sampling: SamplingConfig, generation: Mapping[str, Any]) -> str:
    """Return a clause on what a generation config asks for and `sampling` does not follow; empty if it follows all."""
    given = {name for name, value in generation.items() if value is not None}
    given |= {"temperature"} if "do_sample" in given else set()
    asked = {name: value for name, value in _asked(generation).items() if name in given}
    settings = [said(f"sampling.{name}", value) for name, value in asked.items() if value != getattr(sampling, name)]
    others = [
        name
        for name, value in generation.items()
        if name not in {*from_transformers(), "do_sample"} and not name.startswith(_CHANGES_NO_TEXT)
        if value not in (None, False, 0, 1, [], {})
    ]
    whole = said("sampling", "model")
    clauses = [f"{' '.join(settings)}, which this text does not follow: {whole} takes all of them"] if settings else []
    clauses += [f"{', '.join(others)}, which no setting follows"] if others else []
    return f"the model's generation_config.json asks for {'; and for '.join(clauses)}" if clauses else ""


def _asked(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that the file asks for, with defaults; without `do_sample` it asks for the most probable token."""
    defaults = from_transformers()
    given = {name: value for name in defaults if (value := generation.get(name)) is not None}
    asked = {**defaults, **given}
    is_greedy = not generation.get("do_sample")
    asked |= {"temperature": 0.0} if is_greedy else {}
    for one in filters():
        if one.name in asked and (is_greedy or asked[one.name] == one.off):
            asked[one.name] = None
    return asked
