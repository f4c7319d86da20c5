"""The reference of all settings: types and values from the dataclasses, descriptions from the comments in `conf`.

A setting is described where its default is written: by the comment behind it, and by comments below that stand further
to the right. In `conf/config.yaml` a comment at the margin is the heading of the settings below it.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from docs.hooks.repository import ROOT, comment
from llama_ssp.config.drafters import drafters
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.plan import PlanConfig
from llama_ssp.config.schema import DrafterConfig, RunConfig
from llama_ssp.config.slurm import KEY as LAUNCHER
from llama_ssp.config.slurm import SlurmConfig
from llama_ssp.config.tasks import task_specs

CONF = ROOT / "conf"
_INTRODUCTION = (
    "The build makes this page from the dataclasses in `llama_ssp/config` and the comments in `conf`. Every setting is "
    "`name=value` on the command line. `llama-ssp run --help all` prints the same settings by topic, and "
    "`--cfg job` prints the composed values of one run."
)
_KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<rest>.*)")
_BEHIND = re.compile(r"(?:^|\s)# (?P<text>.*)")
_CONTINUED = re.compile(r" {2,}# (?P<text>.*)")
_ATTRIBUTE = re.compile(r" {4,}(?P<names>\w+(?:, \w+)*): (?P<text>.+(?:\n {8,}\S.*)*)")
_FIRST = {"model": "local", "draft": "default", "placement": "tensor", "sampling": "default"}
"""The option of a group whose file describes its settings; all others add what it lacks."""
_NOT_LISTED = ("model.shape.", "draft.model.")
"""The words of config.json, and the fields of `model` once more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of a table."""

    key: str
    kind: str
    default: str
    meaning: str


def comments(file: Path) -> dict[str, str]:
    """Read what a YAML file says of each dotted key."""
    said: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := _KEY.match(line):
            indent = len(match["indent"])
            path = [(column, key) for column, key in path if column < indent] + [(indent, match["key"])]
            if behind := _BEHIND.search(match["rest"]):
                said[_dotted(path)] = behind["text"]
        elif (match := _CONTINUED.match(line)) and _dotted(path) in said:
            said[_dotted(path)] += " " + match["text"]
    return said


def headings(file: Path) -> dict[str, str]:
    """Read the comment at the margin above each key of the first level; the last one holds on."""
    found, current, block = {}, "", list[str]()
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            block.append(line.removeprefix("# "))
        elif block:
            current, block = " ".join(block), []
        if (match := _KEY.match(line)) and not match["indent"]:
            found[match["key"]] = current.rstrip(".")
    return found


def _dotted(path: list[tuple[int, str]]) -> str:
    return ".".join(key for _, key in path)


@cache
def group_comments(group: str) -> dict[str, str]:
    """Read what the files of a group say of its settings, its describing option first."""
    files = sorted((CONF / group).glob("*.yaml"), key=lambda file: (file.stem != _FIRST.get(group), file.stem))
    said: dict[str, str] = {}
    for file in files:
        said = comments(file) | said
    return said


def attributes(docstring: str) -> dict[str, str]:
    """Read the `Attributes:` of a dataclass."""
    found = _ATTRIBUTE.finditer(cleandoc(docstring).partition("Attributes:")[2])
    return {name: " ".join(each["text"].split()) for each in found for name in each["names"].split(", ")}


def schema_settings(schema: type[Any], said: dict[str, str], *, prefix: str = "", below: str = "") -> Iterator[Setting]:
    """Describe every setting of a dataclass and of those inside it.

    Args:
        schema: the dataclass.
        said: descriptions by dotted key, without the prefix.
        prefix: what stands before a key on the command line.
        below: what stands before a key in `said`.
    """
    hints = get_type_hints(schema)
    for each in dataclasses.fields(schema):
        inner = next((kind for kind in (hints[each.name], *get_args(hints[each.name])) if _is_schema(kind)), None)
        if each.name.startswith("_"):
            continue
        if inner:
            yield from schema_settings(inner, said, prefix=f"{prefix}{each.name}.", below=f"{below}{each.name}.")
            continue
        meaning = said.get(f"{below}{each.name}", "")
        yield Setting(key=f"{prefix}{each.name}", kind=_kind(hints[each.name]), default=_default(each), meaning=meaning)


def _is_schema(kind: object) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _kind(hint: object) -> str:
    """Name a type as the command line knows it: the members of an enum, or one word."""
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join("null" if each is type(None) else _kind(each) for each in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.name}`" for member in hint)
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0])}"
    for kind, name in ((str, "text"), (int, "integer"), (float, "number"), (bool, "`true`, `false`")):
        if hint is kind:
            return name
    return "mapping"


def _default(each: dataclasses.Field[Any]) -> str:
    """Write a default as YAML has it; empty where a value is required or made by a factory."""
    if each.default is dataclasses.MISSING:
        return "" if each.default_factory is dataclasses.MISSING else f"`{each.default_factory()}`"
    if isinstance(each.default, Enum):
        return f"`{each.default.name}`"
    plain = {None: "null", True: "true", False: "false"}
    return f"`{plain.get(each.default, each.default) if isinstance(each.default, bool | None) else each.default}`"


def table(settings: Iterable[Setting]) -> str:
    """Draw settings as a table."""
    rows = [(f"`{each.key}`", each.kind, each.default, each.meaning.replace("|", "\\|")) for each in settings]
    lines = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def options(group: str) -> str:
    """Draw the options of a group as a table: what each file says of itself."""
    named = [file for file in sorted((CONF / group).glob("*.yaml")) if file.stem != "this_machine"]
    rows = [f"| `{file.stem}` | {' '.join(comment(file).split())} |" for file in named]
    return "\n".join([f"| `{group}=` | |", "|---|---|", *rows])


def groups() -> list[str]:
    """Return the groups of `launch/run.py` that have a dataclass and a folder."""
    hints = get_type_hints(RunConfig)
    return [name for name, kind in hints.items() if _is_schema(kind) and (CONF / name).is_dir()]


def group_settings(group: str) -> Iterator[Setting]:
    """Describe the settings of one group."""
    listed = schema_settings(get_type_hints(RunConfig)[group], group_comments(group), prefix=f"{group}.")
    return (each for each in listed if not each.key.startswith(_NOT_LISTED))


def task_settings(task: str, schema: type[Any]) -> Iterator[Setting]:
    """Describe the settings that a task has of its own."""
    file = CONF / "task" / f"{task}.yaml"
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    for each in schema_settings(schema, comments(file), prefix="task."):
        value = values.get(each.key.removeprefix("task."))
        if isinstance(value, list):
            shown = "its own" if isinstance(value[0], str) else f"`{value}`"
            yield dataclasses.replace(each, default=shown)
        elif each.key != "task.name":
            yield each


def draft_settings(name: str, schema: type[Any]) -> Iterator[Setting]:
    """Describe the settings that a kind of draft has of its own."""
    shared = {each.name for each in dataclasses.fields(DrafterConfig)}
    if own := {each.name for each in dataclasses.fields(schema)} - shared:
        file = CONF / "draft" / f"{name}.yaml"
        said = comments(file if file.is_file() else CONF / "draft" / f"{_FIRST['draft']}.yaml")
        listed = schema_settings(schema, said, prefix="draft.")
        yield from (each for each in listed if each.key.removeprefix("draft.") in own)


def option_settings(group: str) -> Iterator[tuple[str, list[Setting]]]:
    """List the options of a group that have settings of their own."""
    listed: dict[str, Iterator[Setting]] = {}
    if group == "task":
        listed = {name: task_settings(name, task.config) for name, task in task_specs().items()}
    elif group == "draft":
        listed = {
            "NAME" if record.has_model else name: draft_settings(name, record.config)
            for name, record in drafters().items()
        }
    yield from ((name, own) for name, settings in listed.items() if (own := list(settings)))


def top_settings(schema: type[Any], file: str) -> dict[str, list[Setting]]:
    """Describe the settings that belong to no group, by the headings of their file."""
    said, over = comments(CONF / file), headings(CONF / file)
    found: dict[str, list[Setting]] = {}
    settings = list(schema_settings(schema, said))
    for key, heading in over.items():
        if not (CONF / key).is_dir():
            found.setdefault(heading, []).extend(each for each in settings if each.key.split(".")[0] == key)
    return {heading: listed for heading, listed in found.items() if listed}


def hardware_settings() -> Iterator[Setting]:
    """Describe the figures of a machine."""
    said = attributes(HardwareConfig.__doc__ or "")
    hints = get_type_hints(HardwareConfig)
    for each in dataclasses.fields(HardwareConfig):
        kind = "mapping" if any(map(_is_schema, (hints[each.name], *get_args(hints[each.name])))) else hints[each.name]
        shown = kind if isinstance(kind, str) else _kind(kind)
        yield Setting(key=f"hardware.{each.name}", kind=shown, default="", meaning=said.get(each.name, ""))


def described() -> list[Setting]:
    """Return every setting that must have a meaning."""
    found = [each for group in groups() if group != "task" for each in group_settings(group)]
    found += [each for group in ("draft", "task") for _, own in option_settings(group) for each in own]
    for schema, file in ((RunConfig, "config.yaml"), (PlanConfig, "plan.yaml")):
        found += [each for settings in top_settings(schema, file).values() for each in settings]
    found += schema_settings(SlurmConfig, comments(CONF / "hydra/launcher/slurm.yaml"), prefix=f"{LAUNCHER}.")
    return [*found, *hardware_settings()]


def page() -> str:
    """Make the page."""
    parts = [
        "# Settings",
        _INTRODUCTION,
        "## `launch/run.py`",
    ]
    for heading, settings in top_settings(RunConfig, "config.yaml").items():
        parts += [f"### {heading}", table(settings)]
    for group in groups():
        parts += [f"## `{group}=`", options(group)]
        if group != "task":
            parts.append(table(group_settings(group)))
        if group == "draft":
            parts.append("`draft.model.FIELD` has the fields of [`model`](#model).")
        parts += [text for name, own in option_settings(group) for text in (f"### `{group}={name}`", table(own))]
    for bundle in ("experiment", "debug"):
        parts += [
            f"## `{bundle}=`",
            "Several settings at once. A setting that you give yourself wins.",
            options(bundle),
        ]
    parts += ["## `hardware=`", options("hardware"), table(hardware_settings())]
    parts.append("## `launch/plan.py`")
    parts.append("Model, draft and placement are those of `launch/run.py`; these are the plan's own settings.")
    for settings in top_settings(PlanConfig, "plan.yaml").values():
        parts.append(table(settings))
    slurm = schema_settings(SlurmConfig, comments(CONF / "hydra/launcher/slurm.yaml"), prefix=f"{LAUNCHER}.")
    parts += ["## `-m hydra/launcher=slurm`", table(slurm)]
    return "\n\n".join(parts) + "\n"
