"""`--help`: the text of help.txt, in which a line in braces stands for settings, options, tasks or names.

A topic opens with its name in capitals and a colon, at the margin. `--help` alone prints an overview, `--help TOPIC`
one topic, `--help SETTING` the topics that explain it, `--help all` everything.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError, unknown_name
from llama_ssp.reports.formats import FORMATS
from llama_ssp.settings.aliases import counterparts
from llama_ssp.settings.backends import backends
from llama_ssp.settings.commands import COMMANDS, TOPICS
from llama_ssp.settings.drafters import drafters, free_drafts
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.fields import help_of
from llama_ssp.settings.launchers import LAUNCHER, LAUNCHERS
from llama_ssp.settings.lengths import CHOOSERS, choosers_said
from llama_ssp.settings.schema import DERIVED, PlanConfig, RunConfig
from llama_ssp.settings.tasks import REQUEST_FILES, task_specs
from llama_ssp.settings.weights import WEIGHTS
from llama_ssp.storage.formats import formats
from llama_ssp.text.messages import listed, visible

_ALL, _WIDTH = "all", 118
_PLACE = re.compile(r"^ *\{(\w+)([^}\n]*)\}\n", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribedSetting:
    """A setting; `default` is empty where a value is required."""

    key: str
    kind: str
    default: str
    meaning: str


def show(words: Sequence[str]) -> None:
    """Print what the words after `--help` ask for; raises ConfigError for a word that no topic has."""
    if tasks := [name for name in options_of("task") if f"task={name}" in words]:
        print(visible(f"{_of_tasks(tasks)}\n\nAll other settings are those of a run: llama-ssp run --help"))
        return
    file = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    head, *parts = re.split(r"^(?=[A-Z]+: )", file, flags=re.MULTILINE)
    for topic in TOPICS.all().values():
        place = next(number for number, part in enumerate(parts) if part.startswith(f"{topic.after.upper()}: "))
        parts.insert(place + 1, topic.text)
    head, *parts = map(_with_places, (head, *parts))
    topics = {part.partition(":")[0].lower(): part for part in parts}
    if _ALL in words:
        shown = [head, *parts]
    elif words:
        names = {topic for word in words for topic in _topics_of(word.partition("=")[0], topics)}
        shown = [part for topic, part in topics.items() if topic in names]
    else:
        titles = [f"  {topic:<13}{part.partition(': ')[2].splitlines()[0]}" for topic, part in topics.items()]
        listed = "\n".join(["TOPICS: --help TOPIC, --help SETTING, or --help all", *titles])
        shown = [head, topics["start"], listed, topics["examples"], topics["exit"]]
    print(visible("\n\n".join(shown)))


def _with_places(text: str) -> str:
    """Return a part of the help with its placeholders replaced."""
    failures = "".join(f" {task.failure}," for task in task_specs().values() if task.failure)
    filled = _PLACE.sub(lambda place: f"{_filled(place[1], place[2].split())}\n".lstrip("\n"), text)
    run_files, reports = _reports()
    filled = filled.replace("{failures}", failures).replace("{run_files}", run_files).replace("{reports}", reports)
    return filled.strip("\n")


def _topics_of(word: str, topics: dict[str, str]) -> list[str]:
    """Return the topics to show for a word: the topic of this name, else those that explain the setting of this name.

    If there are none, return all topics that mention the word; raises ConfigError if none does.
    """
    if word.lower() in topics:
        return [word.lower()]
    if (meant := counterparts().get(word)) and meant.key:
        word = meant.key
    for before in (r"^ +(?:[\w.]+\.)?", r"(?<!\w)"):
        whole = re.compile(rf"{before}{re.escape(word)}(?!\w)", re.MULTILINE)
        if found := [topic for topic, part in topics.items() if whole.search(part)]:
            return found
    problem = unknown_name("topic", word, [_ALL, *topics])
    raise ConfigError(f"{problem}; the name of a setting finds its topic too")


def entries(settings: Iterable[DescribedSetting], indent: str = "") -> str:
    """Write settings as entries of a topic."""
    return "\n".join(_entry(f"{indent}{one.key}={one.default}", one.meaning) for one in settings)


def _filled(kind: str, words: Sequence[str]) -> str:
    """Return the lines for a placeholder such as {settings seed sampling.}, {options draft} or {names model}."""
    if kind == "names":
        return _wrapped(" ".join(catalogue.names(words[0])), "  ", "  ")
    if kind == "options":
        return "\n".join(_entry(f"{words[0]}={name}", said) for name, said in options_of(words[0]).items())
    if kind == "tasks":
        return _of_tasks(options_of("task"))
    if kind == "commands":
        return "\n".join(command.example for command in COMMANDS.all().values() if command.example)
    groups = tuple(word for word in words if word.endswith("."))
    return entries(one for one in _settings() if one.key in words or one.key.startswith(groups))


def _reports() -> tuple[str, str]:
    """The files of reports in every run's folder, and the commands that report a sweep with what they write."""
    forms = [form for form in FORMATS.all().values() if form.file]
    files = "".join(f" {form.file} ({form.purpose})," for form in forms if form.purpose)
    written = listed([str(form.file) for form in forms])
    commands = [command for command in COMMANDS.all().values() if command.of_sweeps]
    said = "".join(f"llama-ssp {command.name} run_dir {command.of_sweeps}, {written}. " for command in commands)
    return files, f"{';' * bool(said)}\n{' ' * 25}{said}"


def _of_tasks(names: Iterable[str]) -> str:
    said = options_of("task")
    return "\n".join(
        f"{_entry(f'task={name}', said[name])}\n{entries(task_settings(name), '  ')}".rstrip() for name in names
    )


def _settings() -> Iterable[DescribedSetting]:
    """All settings, without derived ones, and without the fields of `model` once more."""
    found = [*settings_of(whole(RunConfig)), *settings_of_launchers()]
    found += [one for draft in drafters().values() for one in settings_of(draft.settings, "draft.")]
    kept = {(one.key, one.meaning): one for one in found}.values()
    return (one for one in kept if not one.key.startswith((*DERIVED, "draft.model.")))


def _entry(name: str, meaning: str) -> str:
    first = f"  {name:<32} "
    return (_wrapped(meaning, first, " " * 35) or first).rstrip()


def _wrapped(text: str, first: str, later: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )


def settings_of(schema: type[Any], prefix: str = "") -> Iterator[DescribedSetting]:
    """Describe every setting of a dataclass and of the dataclasses inside it; their keys begin with `prefix`.

    A setting that needs records of extensions is left out if there are none (see `_meaning`).
    """
    hints = get_type_hints(schema)
    for entry in dataclasses.fields(schema):
        if entry.metadata.get("omegaconf_ignore"):
            continue
        hint, key = hints[entry.name], f"{prefix}{entry.name}"
        if inner := next(filter(is_schema, (hint, *get_args(hint))), None):
            yield from settings_of(whole(inner), f"{key}.")
        elif (meaning := _meaning(entry)) or not help_of(entry):
            yield DescribedSetting(key=key, kind=_kind(hint), default=_default(entry), meaning=meaning)


def _meaning(entry: dataclasses.Field[Any]) -> str:
    """Return the help of a field, with its placeholders replaced by texts of the registered records.

    Empty if the field needs records of a kind that is not registered.
    """
    kept = [name for name, storage in formats().items() if not storage.is_stored_alone]
    more = {
        "{request_files}": "".join(f", or {kind.purpose}" for kind in REQUEST_FILES.all().values()),
        "{choosers}": choosers_said(),
        "{or_choosers}": "".join(f", or {one.name}, which {one.purpose}" for one in CHOOSERS.all().values()),
        "{free_drafts}": "".join(f", for example {name}" for name in free_drafts()[:1]),
        "{formats}": listed(kept, "or"),
        "{backends}": " ".join(backend.purpose for backend in backends().values()),
        "{weights}": " ".join(source.purpose for source in WEIGHTS.all().values() if source.purpose),
    }
    meaning = help_of(entry)
    if "{choosers}" in meaning and not more["{choosers}"]:
        return ""
    for place, text in more.items():
        meaning = meaning.replace(place, text)
    return meaning


def settings_of_launchers() -> Iterator[DescribedSetting]:
    """Describe the settings of all launchers."""
    for launcher in LAUNCHERS.all().values():
        yield from settings_of(launcher.config, f"{LAUNCHER}.")


def settings_of_plan() -> list[DescribedSetting]:
    """Describe the settings that a plan has and a run has not."""
    of_runs = {entry.name for entry in dataclasses.fields(whole(RunConfig))}
    return [one for one in settings_of(whole(PlanConfig)) if one.key.partition(".")[0] not in of_runs]


def task_settings(name: str) -> list[DescribedSetting]:
    """Describe the settings that a task has of its own, with the values of its option."""
    file = catalogue.find("task", name)
    shown = {
        f"task.{key}": "[...]" if isinstance(value, list) and isinstance(value[0], str) else str(value)
        for key, value in (catalogue.read(file) if file else {}).items()
    }
    found = settings_of(task_specs()[name].config, "task.")
    return [
        dataclasses.replace(one, default=shown.get(one.key, one.default)) for one in found if one.key not in DERIVED
    ]


def is_schema(kind: object) -> bool:
    """Whether a type is a dataclass of settings."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _kind(hint: object) -> str:
    """A type as the command line knows it: the members of an enum, or one word."""
    if get_origin(hint) in {Union, UnionType}:
        return " or ".join("null" if kind is type(None) else _kind(kind) for kind in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.name}`" for member in hint)
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0])}"
    names = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
    return names.get(hint, "mapping") if isinstance(hint, type) else "mapping"


def _default(entry: dataclasses.Field[Any]) -> str:
    default = entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()
    if default is dataclasses.MISSING:
        return ""
    if isinstance(default, Enum):
        return default.name
    return {None: "null", True: "true", False: "false"}[default] if isinstance(default, bool | None) else str(default)


def options_of(group: str) -> dict[str, str]:
    """The options of a group that are files, with the comment at the head of each file."""
    files = {name: catalogue.find(group, name) for name in catalogue.names(group)}
    return {name: catalogue.head_of(file) for name, file in files.items() if file}
