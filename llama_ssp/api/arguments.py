"""Checks the types of arguments, and reads arguments as other libraries spell them. Imports no torch."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, ParamSpec, TypeVar, cast, get_args, get_type_hints

from llama_ssp import catalogue
from llama_ssp.catalogue import LOCAL, Dtype, ModelConfig, is_hub_id, read_path
from llama_ssp.errors import ConfigError, refuse, similar_name, unknown_name
from llama_ssp.settings.aliases import counterparts
from llama_ssp.settings.checks import required_of
from llama_ssp.settings.draft_heads import head_in_target
from llama_ssp.settings.drafters import VOCABULARIES, DraftVocabulary, drafters, of_kind
from llama_ssp.settings.extensions import MORE, whole
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DrafterConfig,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    SamplingConfig,
)
from llama_ssp.storage.formats import CACHES, FORMATS
from llama_ssp.text.messages import in_library_words, key_of, said

_Kind = TypeVar("_Kind", bound=Enum)
_Settings = TypeVar("_Settings")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_AUTO = "auto"
MORE_ARGUMENTS = "more"
"""The name of a function's parameter that takes the settings that extensions add to sampling."""
FROM_MODEL = "model"
"""The argument `sampling` that takes the values of the target's files."""
_KINDS: dict[object, tuple[type, Callable[[Any], object], str]] = {
    int: (Integral, int, "a whole number"),
    float: (Real, float, "a number"),
    str: (str, str, "a text"),
    bool: (bool, bool, "True or False"),
    NoneType: (NoneType, lambda _: None, "None"),
}
"""For an annotation: the type of values (booleans count only as `bool`), their reader, and words for them."""


def _texts(value: object) -> object:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        return [str(value)] if isinstance(value, str) else None
    return [*value]


def _biases(value: object) -> object:
    is_read = isinstance(value, Mapping) and all(
        isinstance(token, Integral) and isinstance(bias, Real) and not isinstance(token, bool)
        for token, bias in value.items()
    )
    return {int(token): float(bias) for token, bias in value.items()} if is_read else None  # type: ignore[attr-defined]


def _streamer(value: Any) -> object:  # noqa: ANN401 - anything with these methods
    return value if callable(getattr(value, "put", None)) and callable(getattr(value, "end", None)) else None


_READERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "stop_strings": (_texts, "a text or a list of texts"),
    "bad_words": (_texts, "a text or a list of texts"),
    "logit_bias": (_biases, "numbers by the ids of tokens, for example {198: -2.5}"),
    "streamer": (_streamer, "a streamer of transformers, such as TextStreamer(pair.tokenizer)"),
    "sampling": (
        lambda value: value if value == FROM_MODEL else None,
        f"{FROM_MODEL!r}, which takes the target's generation_config.json, or None",
    ),
    "chat_arguments": (
        lambda value: {**value} if isinstance(value, Mapping) else None,
        "arguments of the chat template, for example {'enable_thinking': False}",
    ),
}
"""Readers of other arguments, which return None for values of another type, and words for these values."""


def known_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a function refuse keywords that it does not have, all together, in a ConfigError that names similar ones."""
    names = [name for name in signature(function).parameters if name not in {"self", MORE_ARGUMENTS}]

    takes_more = MORE_ARGUMENTS in signature(function).parameters

    def unknown(name: str, names: Sequence[str]) -> str:
        counterpart = counterparts().get(name.casefold())
        other = counterpart and key_of(counterpart.key)
        meant = other if other in names else similar_name(name, names)
        here = (
            counterpart.sentence.replace("sampling.", "")
            if counterpart and not counterpart.key
            else f"it takes {', '.join(names)}"
        )
        hint = f"did you mean {meant}?" if meant else here
        return f"unknown argument {name!r} of {function.__name__}: {hint}"

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with in_library_words():
            known = [*dict.fromkeys([*names, *(sampling_arguments() if takes_more else ())])]
            refuse([unknown(name, known) for name in kwargs if name not in known])
        return function(*args, **kwargs)

    return checked


@cache
def sampling_arguments() -> dict[str, object]:
    """The settings of sampling that `generate` takes, those of extensions among them, with their defaults."""
    settings = vars(whole(SamplingConfig)())
    return {
        name: value for name, value in settings.items() if name not in {"from_model", "bad_ids", "eos_ids", "by_row"}
    }


@cache
def _kinds_of(function: Callable[..., object]) -> dict[str, tuple[object, ...]]:
    hints = get_type_hints(whole(SamplingConfig)) | get_type_hints(function)
    return {name: get_args(hint) or (hint,) for name, hint in hints.items()}


@cache
def _all_readers() -> dict[str, Any]:
    """Readers of arguments by their names; extensions add some."""
    return {name: reader for more in MORE.all().values() for name, reader in more.readers.items()} | _READERS


def check_types(function: Callable[..., object], given: Mapping[str, object]) -> dict[str, Any]:
    """Read the arguments of a function, numbers as Python's own; arguments of types not in `_KINDS` stay as they are.

    Raises ConfigError for all of a wrong type together.
    """
    values, problems, known = {**given}, [], _kinds_of(function)
    readers = _all_readers()
    for name, value in given.items():
        kinds = known.get(name, (None,))
        if name in readers:
            read, wanted = readers[name]
            values[name] = None if value is None else read(value)
            fits = values[name] is not None or (value is None and NoneType in kinds)
        elif type(value) in kinds:
            continue
        elif all(kind in _KINDS for kind in kinds):
            found = [_KINDS[kind] for kind in kinds]
            fitting = [read for kind, read, _ in found if isinstance(value, kind)]
            fits = bool(fitting) and (bool in kinds or not isinstance(value, bool))
            values[name] = fitting[0](value) if fits else value
            wanted = "" if fits else ": ".join(filter(None, (" or ".join([of[2] for of in found]), required_of(name))))
        else:
            continue
        if not fits:
            problems.append(f"{name}={reprlib.repr(value)} must be {wanted}")
    refuse(problems)
    return values


def member(kind: type[_Kind], what: str, given: object) -> _Kind:
    """Read a member of an enumeration, or its name; raises ConfigError for anything else."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, str) or given not in kind.__members__:
        raise ConfigError(unknown_name(what, str(given), kind.__members__))
    return kind[given]


def with_members(given: _Settings, key: str) -> _Settings:
    """Replace names of members in settings, and in nested settings, by the members; raises the errors of `member`."""
    changes: dict[str, object] = {}
    for name, hint in get_type_hints(type(given)).items():
        value, kinds = (
            getattr(given, name),
            [kind for kind in get_args(hint) or (hint,) if isinstance(kind, type(Enum))],
        )
        if is_dataclass(value):
            changes[name] = with_members(value, f"{key}.{name}")
        elif kinds and value is not None:
            changes[name] = member(kinds[0], f"{key}.{name}", value)
    return replace(cast("Any", given), **changes)  # type: ignore[no-any-return]


def for_each_model(given: object) -> tuple[object, object]:
    """Return an argument as a pair, for the target and for the draft; it is one value for both, or a pair already."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, given)


def formats_of(given: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, object]]:
    """The arguments of `in_format` for the target and for the draft."""
    both = {name: for_each_model(given.get(name)) for name in ("dtype", "quantization", "cache_dtype")}
    return {name: of[0] for name, of in both.items()}, {name: of[1] for name, of in both.items()}


def entry_of(what: str, given: object, *, target: object = None, **formats: object) -> ModelConfig:
    """Make the entry of a model: a name of the catalogue, a folder, or an id of the hub; `what` is model or draft.

    A draft may also be a head in the files of its `target`. For `formats` see `in_format`. Raises ConfigError for
    anything else, and the errors of `in_format`.
    """
    if not isinstance(given, str | Path):
        raise ConfigError(
            f"{what}={reprlib.repr(given)} must be a name of the catalogue, a folder with a checkpoint, owner/name of "
            "the hub, or a causal language model of transformers"
        )
    name = str(given)
    if isinstance(target, ModelConfig) and (head := head_in_target(name)):
        if target.shape and target.shape.model_type not in head.families:
            raise ConfigError(head.lacks(said("model", target.name)))
        return in_format(replace(target, name=head.name, shape=None, default_draft=None), **formats)
    is_named = isinstance(given, str) and name in catalogue.names("model") and name != LOCAL
    if name and not is_named and (folder := read_path(name)).is_dir():
        entry = ModelConfig(name=LOCAL, path=str(folder))
    elif is_named or (isinstance(given, str) and is_hub_id(name)):
        entry = catalogue.load(name)
    else:
        others = [kind for kind, record in drafters().items() if not record.has_model] if what == "draft" else []
        unknown = unknown_name(what, name, {*catalogue.names("model"), *others})
        if "/" in name:
            unknown = f"{what}={name} is no folder that exists"
        raise ConfigError(f"{unknown}; a name of the catalogue, a folder, or owner/name of the hub is required")
    return in_format(entry, **formats)


def in_format(entry: ModelConfig, *, dtype: object, **formats: object) -> ModelConfig:
    """Set the number format of a model, which may be a dtype of torch, and its formats of weights and cache.

    None changes nothing. Raises ConfigError for an unknown format.
    """
    changes: dict[str, Any] = {}
    if dtype is not None:
        found = dtype if isinstance(dtype, Dtype) else Dtype.find(dtype)
        if found is None:
            raise ConfigError(unknown_name("dtype", str(dtype), Dtype.__members__))
        changes["dtype"] = found
    for key, registry in (("quantization", FORMATS), ("cache_dtype", CACHES)):
        if formats[key] is not None:
            if problem := registry.problem_of(str(formats[key]), key=key):
                raise ConfigError(problem)
            changes[key] = str(formats[key])
    return replace(entry, **changes)


def draft_of(given: object) -> tuple[object, dict[str, object]]:
    """The kind or model that an argument drafts with, and the settings that a mapping has beside it."""
    if not isinstance(given, Mapping):
        return given, {}
    settings = {**given}
    named = [settings.pop(name) for name in ("kind", "model") if name in settings]
    if len(named) != 1:
        raise ConfigError(
            f"draft={reprlib.repr(given)} must have either a kind, as {{'kind': 'self', 'window': 512}}, or a model, "
            "as {'model': 'tiny-draft', 'window': 512}"
        )
    return named[0], settings


def _with_settings(draft: DrafterConfig, settings: Mapping[str, object]) -> DrafterConfig:
    """Return a draft with these settings; raises ConfigError for unknown settings and for values of a wrong type."""
    elsewhere = {"kind", "model", *(one.setting for one in VOCABULARIES.all().values())}
    names = [entry.name for entry in fields(draft) if entry.name not in elsewhere]
    refuse([unknown_name("setting of the draft", name, names) for name in settings if name not in names])
    return with_members(replace(draft, **check_types(type(draft), settings)), "draft")


def drafter_without_model(given: object) -> DrafterConfig | None:
    """The drafter that an argument names if it needs no model, such as ngram; None if the argument is a model."""
    given, settings = draft_of(given)
    name = NO_DRAFT if given is None else given
    is_kind = isinstance(name, str) and name in drafters() and not drafters()[name].has_model
    return _with_settings(of_kind(str(name)), settings) if is_kind else None


def vocabulary_of(given: object) -> DraftVocabulary:
    """The vocabulary of drafts that an argument names, by a name or by the value of its setting."""
    return VOCABULARIES.of(given.name if isinstance(given, Enum) else str(given))


def draft_model(entry: ModelConfig, vocabulary: DraftVocabulary, given: object = None) -> DrafterConfig:
    """The settings of a draft model, changed as the argument says."""
    asked: dict[str, Any] = {vocabulary.setting: vocabulary.value} if vocabulary.setting else {}
    return _with_settings(replace(of_kind(MODEL_DRAFT), model=entry, **asked), draft_of(given)[1])


def placement_of(given: object) -> PlacementConfig:
    """The placement that an argument names or is."""
    if given is None or isinstance(given, PlacementConfig):
        return with_members(given or PlacementConfig(), "placement")
    if given == _AUTO:
        return PlacementConfig(auto=True)
    if not isinstance(given, str) or given not in DraftLayout.__members__:
        raise ConfigError(unknown_name("placement", str(given), [_AUTO, *DraftLayout.__members__]))
    return PlacementConfig(draft=DraftPlacement(kind=DraftLayout[given]))
