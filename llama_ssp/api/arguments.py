"""Checks the types of arguments, and reads those that other libraries spell in their own way. Imports no torch."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llama_ssp import catalogue
from llama_ssp.catalogue import LOCAL, Dtype, ModelConfig, is_hub_id, read_path
from llama_ssp.errors import ConfigError, one_message, similar_name, unknown_name
from llama_ssp.settings.drafters import DraftTokenizer, ModelDraftConfig, drafters
from llama_ssp.settings.foreign import FOREIGN
from llama_ssp.settings.schema import ADAPTIVE, MODEL_DRAFT, NO_DRAFT, DrafterConfig
from llama_ssp.storage.formats import CACHES, FORMATS
from llama_ssp.words import in_library_words, key_of

_Kind = TypeVar("_Kind", bound=Enum)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
FROM_MODEL = "model"
"""The argument `sampling` that takes the values of the target's files."""


_Reader = Callable[[Any], object]
"""Reads an argument; raises TypeError for one of another type."""


def _of(kind: type, read: _Reader, *, or_none: bool = False) -> _Reader:
    """Read values of a kind, of which booleans are none but for `bool`."""

    def reader(value: object) -> object:
        if or_none and value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError
        return read(value)

    return reader


def _sampling(value: object) -> object:
    if value not in {None, FROM_MODEL}:
        raise TypeError
    return value


def _streamer(value: Any) -> Any:  # noqa: ANN401 - anything with these methods
    if value is not None and not (callable(getattr(value, "put", None)) and callable(getattr(value, "end", None))):
        raise TypeError
    return value


_whole, _number, _text, _flag = _of(Integral, int), _of(Real, float), _of(str, str), _of(bool, bool)
_whole_or_none, _number_or_none = _of(Integral, int, or_none=True), _of(Real, float, or_none=True)
_texts = _of(Sequence, lambda texts: [texts] if isinstance(texts, str) else [_text(text) for text in texts])
_ENOUGH = "a number, for example"
_ARGUMENTS: dict[str, tuple[_Reader, str]] = {
    "max_new_tokens": (_whole, "a whole number of tokens, for example 64"),
    "num_draft_tokens": (
        lambda value: value if value == ADAPTIVE else _whole(value), f"a whole number, for example 4, or {ADAPTIVE!r}"
    ),
    "tree": (_of(str, str, or_none=True), "the shape of a tree, for example '2x2x1', or None for a chain"),
    "temperature": (_number, f"{_ENOUGH} 0.8; 0 is greedy"),
    "top_k": (_whole_or_none, "a whole number, for example 50, or None for the whole vocabulary"),
    "top_p": (_number_or_none, f"{_ENOUGH} 0.9, or None to switch it off"),
    "min_p": (_number_or_none, f"{_ENOUGH} 0.05, or None to switch it off"),
    "repetition_penalty": (_number, f"{_ENOUGH} 1.1; 1 switches it off"),
    "frequency_penalty": (_number, f"{_ENOUGH} 0.5; 0 switches it off"),
    "presence_penalty": (_number, f"{_ENOUGH} 0.5; 0 switches it off"),
    "sampling": (_sampling, f"{FROM_MODEL!r}, which takes the target's generation_config.json, or None"),
    "seed": (_whole, "a whole number"),
    "num_samples": (_whole, "a whole number of completions of each prompt"),
    "batch_size": (_whole, "a whole number of rows, for example 8"),
    "stop": (_texts, "a text or a list of texts"),
    "chat": (_flag, "True or False"),
    "chat_arguments": (_of(Mapping, dict), "arguments of the chat template, for example {'enable_thinking': False}"),
    "plain": (_flag, "True or False"),
    "rule": (_text, "the name of a rule"),
    "streamer": (_streamer, "a streamer of transformers, such as TextStreamer(pair.tokenizer)"),
    "prompt_tokens": (_whole, "a whole number of tokens, for example 128"),
    "acceptance": (_number_or_none, f"{_ENOUGH} 0.8, or None for that of the pair"),
    "num_gpus": (_whole_or_none, "a whole number, or None"),
    "num_nodes": (_whole_or_none, "a whole number, or None"),
}  # fmt: skip
"""The reader of each argument, and its description in an error."""


def known_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a function refuse keywords that it does not have, all together, in a ConfigError that names similar ones."""
    names = [name for name in signature(function).parameters if name != "self"]

    def unknown(name: str) -> str:
        counterpart = FOREIGN.get(name.casefold())
        other = counterpart and key_of(counterpart.key)
        meant = other if other in names else similar_name(name, names)
        hint = f"did you mean {meant}?" if meant else f"it takes {', '.join(names)}"
        return f"unknown argument {name!r} of {function.__name__}: {hint}"

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with in_library_words():
            if problems := [unknown(name) for name in kwargs if name not in names]:
                raise ConfigError(one_message(problems))
        return function(*args, **kwargs)

    return checked


def check_types(given: Mapping[str, object]) -> dict[str, Any]:
    """Read arguments by name, numbers as Python's own; those that have no reader stay as they are.

    Raises ConfigError for all of a wrong type together.
    """
    values, problems = {**given}, []
    for name in [name for name in given if name in _ARGUMENTS]:
        read, wanted = _ARGUMENTS[name]
        try:
            values[name] = read(given[name])
        except TypeError:
            problems.append(f"{name}={reprlib.repr(given[name])} must be {wanted}")
    if problems:
        raise ConfigError(one_message(problems))
    return values


def member(kind: type[_Kind], what: str, given: object) -> _Kind:
    """Read a member of an enumeration, or its name; raises ConfigError for anything else."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, str) or given not in kind.__members__:
        raise ConfigError(unknown_name(what, str(given), kind.__members__))
    return kind[given]


def for_each_model(given: object) -> tuple[object, object]:
    """An argument of both models, or a pair of arguments: the target's and the draft's."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, given)  # noqa: PLR2004 - target and draft


def formats_of(given: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, object]]:
    """The arguments of `in_format` for the target and for the draft."""
    both = {name: for_each_model(given[name]) for name in ("dtype", "quantization", "cache_dtype")}
    return {name: of[0] for name, of in both.items()}, {name: of[1] for name, of in both.items()}


def entry_of(what: str, given: object, **formats: object) -> ModelConfig:
    """Make the entry of a model: a name of the catalogue, a folder, or an id of the hub; `what` is target or draft.

    `formats` are those of `in_format`. Raises ConfigError for anything else, and as `in_format`.
    """
    if not isinstance(given, str | Path):
        raise ConfigError(
            f"{what}={reprlib.repr(given)} must be a name of the catalogue, a folder with a checkpoint, owner/name of "
            "the hub, or a causal language model of transformers"
        )
    name = str(given)
    is_named = isinstance(given, str) and name in catalogue.names("model") and name != LOCAL
    if name and not is_named and (folder := read_path(name)).is_dir():
        entry = ModelConfig(name=LOCAL, path=str(folder))
    elif is_named or (isinstance(given, str) and is_hub_id(name)):
        entry = catalogue.load(name)
    else:
        unknown = unknown_name(what, name, catalogue.names("model"))
        raise ConfigError(f"{unknown}; a folder works too, and so does owner/name of the hub")
    return in_format(entry, **formats)


def in_format(entry: ModelConfig, *, dtype: object, **formats: object) -> ModelConfig:
    """Change the number format, ours or that of torch, and the formats of weights and cache; None changes nothing.

    Raises ConfigError for an unknown one.
    """
    if dtype is not None:
        name = dtype.value if isinstance(dtype, Dtype) else str(dtype).removeprefix("torch.")
        found = next((member for member in Dtype if name in {member.name, member.value}), None)
        if found is None:
            raise ConfigError(unknown_name("dtype", str(dtype), Dtype.__members__))
        entry.dtype = found
    for key, registry in (("quantization", FORMATS), ("cache_dtype", CACHES)):
        if formats[key] is not None:
            if problem := registry.problem_of(str(formats[key]), key=key):
                raise ConfigError(problem)
            setattr(entry, key, str(formats[key]))
    return entry


def drafter_without_model(given: object) -> DrafterConfig | None:
    """The drafter that an argument names if it has no model, such as ngram; None if the argument is a model."""
    kinds = {name: record for name, record in drafters().items() if not record.has_model}
    name = NO_DRAFT if given is None else given
    return kinds[name].config(kind=name) if isinstance(name, str) and name in kinds else None


def model_drafter(model: ModelConfig, *, tokenizer: object) -> ModelDraftConfig:
    """A draft model, with the target's tokenizer or its own; raises ConfigError for an unknown choice."""
    choice = member(DraftTokenizer, "tokenizer", tokenizer)
    return ModelDraftConfig(kind=MODEL_DRAFT, model=model, tokenizer=choice)
