"""The settings for a reader: key, type, default and meaning, from the fields of their dataclasses."""

import dataclasses
from collections.abc import Iterator
from enum import Enum
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from llama_ssp.settings import catalogue
from llama_ssp.settings.fields import help_of
from llama_ssp.settings.schema import DERIVED, PlanConfig, RunConfig
from llama_ssp.settings.tasks import task_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribedSetting:
    """A setting; `default` is empty where a value is required."""

    key: str
    kind: str
    default: str
    meaning: str


def settings_of(schema: type[Any], prefix: str = "") -> Iterator[DescribedSetting]:
    """Describe every setting of a dataclass and of those inside it; a prefix stands before their keys."""
    hints = get_type_hints(schema)
    for each in dataclasses.fields(schema):
        if each.metadata.get("omegaconf_ignore"):
            continue
        hint, key = hints[each.name], f"{prefix}{each.name}"
        if inner := next(filter(is_schema, (hint, *get_args(hint))), None):
            yield from settings_of(inner, f"{key}.")
        else:
            yield DescribedSetting(key=key, kind=_kind(hint), default=_default(each), meaning=help_of(each))


def settings_of_plan() -> list[DescribedSetting]:
    """Describe the settings that a plan has and a run has not."""
    of_runs = {each.name for each in dataclasses.fields(RunConfig)}
    return [each for each in settings_of(PlanConfig) if each.key.partition(".")[0] not in of_runs]


def task_settings(name: str) -> list[DescribedSetting]:
    """Describe the settings that a task has of its own, with the values of its option."""
    file = catalogue.find("task", name)
    shown = {
        f"task.{key}": "[...]" if isinstance(value, list) and isinstance(value[0], str) else str(value)
        for key, value in (catalogue.read(file) if file else {}).items()
    }
    found = settings_of(task_specs()[name].config, "task.")
    return [
        dataclasses.replace(each, default=shown.get(each.key, each.default))
        for each in found
        if each.key not in DERIVED
    ]


def is_schema(kind: object) -> bool:
    """Whether a type is a dataclass of settings."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _kind(hint: object) -> str:
    """A type as the command line knows it: the members of an enum, or one word."""
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join("null" if each is type(None) else _kind(each) for each in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.name}`" for member in hint)
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0])}"
    names = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
    return names.get(hint, "mapping") if isinstance(hint, type) else "mapping"


def _default(each: dataclasses.Field[Any]) -> str:
    """Write a default as the command line takes it."""
    default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
    if default is dataclasses.MISSING:
        return ""
    if isinstance(default, Enum):
        return default.name
    return {None: "null", True: "true", False: "false"}[default] if isinstance(default, bool | None) else str(default)


def options_of(group: str) -> dict[str, str]:
    """The options of a group that are files, with the comment at the head of each file."""
    files = {name: catalogue.find(group, name) for name in catalogue.names(group)}
    return {name: head_of(file) for name, file in files.items() if file}


def head_of(file: Path) -> str:
    """The comment at the head of a file of options, without Hydra's directives."""
    head = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("# ") for line in head if not line.startswith("# @"))
