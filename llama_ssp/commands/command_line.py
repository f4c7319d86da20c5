"""Checks the command line before Hydra reads it, so that every mistake is reported at once and in our words.

Knows the names that exist (groups, options, keys of the schema) and the syntax of overrides, but no values: Hydra
checks types, `config.checks` ranges and combinations.
"""

import argparse
import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from llama_ssp.commands.unknown_settings import unknown_setting, unread_words, unreadable
from llama_ssp.config import catalogue, folders
from llama_ssp.config.drafters import DrafterRecord, drafters
from llama_ssp.config.options import choices
from llama_ssp.config.schema import MODEL_DRAFT, ModelShape, RunConfig
from llama_ssp.config.store import BUNDLES
from llama_ssp.config.tasks import TaskSpec, task_specs
from llama_ssp.errors import ConfigError, one_message, unknown_name

# Fields that follow from a group choice: task=, model= and draft= set them.
_DERIVED = {"task.name", "model.name", "model.shape", "draft.kind", "draft.model.name", "draft.model.shape"}


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read Hydra's own options (`-m`, `--help`, `--cfg`, ...) and the overrides; raises ConfigError for bad options.

    The folder of `--config-dir` is searched from now on.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            options = get_args_parser().parse_args(arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
        reason = output.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(
            f"{reason}: settings are written name=value, for example model=7B, and --help all lists them"
        ) from None
    folders.use(options.config_dir)
    if not options.help:
        _check_options(options)
    return options


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that Hydra would answer with a message of its own."""
    names = ("run", "multirun", "cfg", "info", "shell_completion")
    given = [f"--{name}" for name in names if getattr(options, name) not in {None, False}]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one of them")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve needs --cfg: --cfg job --resolve")


_PATHS = {
    "run_dir", "prompts", "model.path", "model.manifest", "draft.model.path", "draft.model.manifest", "figure",
}  # fmt: skip


def take_literally(argument: str, *, multirun: bool = False) -> str:
    """Quote texts and paths so that Hydra passes them on unchanged.

    The text of `prompt=TEXT` is everything after the sign, with its commas, brackets and quotes. The items of
    `stop_strings=[...]` are those of Hydra's grammar. A path that is quoted, null or holds ${...} stays as it is; with
    `multirun`, a path with commas is several paths.
    """
    key, _, value = argument.partition("=")
    if _is_path(key) and value not in {"", "null"} and not value.startswith(("'", '"')) and "${" not in value:
        is_plain = (multirun and "," in value) or _value_of(argument) == value
        return argument if is_plain else f"{key}={_quoted(value)}"
    if argument.startswith("prompt="):
        return f"prompt={_quoted(argument.removeprefix('prompt='))}"
    if argument.startswith("stop_strings="):
        texts = _value_of(argument)
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            # The settings of a submitted job are already protected.
            raw = (text.replace("\\${", "${") for text in texts)
            return f"stop_strings=[{','.join(map(_quoted, raw))}]"
    return argument


def _is_path(key: str) -> bool:
    return key in _PATHS or any(key == f"task.{name}" for task in task_specs().values() for name in task.paths)


def _value_of(argument: str) -> object:
    """Return what Hydra makes of the value; None if it cannot read it."""
    override = parsed_override(argument)
    return override.value() if override else None


def _quoted(text: str) -> str:
    """Quote for Hydra; a backslash keeps OmegaConf from filling in ${...}, after doubling those already there."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def parsed_override(text: str) -> Override | None:
    """Return what Hydra's grammar makes of a word; None if it is no override."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def explicit_keys(overrides: Iterable[str]) -> frozenset[str]:
    """Return the dotted keys and groups that the overrides set."""
    parser = OverridesParser.create()
    return frozenset(override.key_or_group for override in parser.parse_overrides(list(overrides)))


def check_overrides(overrides: Sequence[str], *, multirun: bool) -> None:
    """Raise ConfigError with every name that does not exist, and every text that is no override.

    Args:
        overrides: as given to Hydra.
        multirun: whether `a,b` means two runs.
    """
    parses = {text: parsed_override(text) for text in overrides}
    parsed = [override for override in parses.values() if override]
    problems = unread_words([text for text, override in parses.items() if not override])
    groups = groups_of()
    keys = keys_of_run(parsed, groups)
    for override in parsed:
        if not override.is_hydra_override() or "_target_" in (override.input_line or ""):
            problems.extend(_problems(override, groups, keys, multirun=multirun))
    if problems:
        raise ConfigError(one_message(problems))


def check_launcher(overrides: Sequence[str], *, multirun: bool) -> None:
    """Raise ConfigError for launcher settings without a sweep: Hydra would run the job here instead."""
    chosen = [key for key in explicit_keys(overrides) if key.startswith(("hydra/launcher", "hydra.launcher"))]
    if chosen and not multirun:
        raise ConfigError(
            f"{min(chosen)} is for sweeps: add -m to submit a job per point, or submit a single job with "
            "sbatch launch/slurm.sbatch"
        )


def _problems(
    override: Override, groups: dict[str, list[str]], keys: frozenset[str], *, multirun: bool
) -> Iterator[str]:
    text, key = override.input_line, override.key_or_group
    if key != "prompt" and "_target_" in (text or ""):
        yield f"{text}: _target_ is refused, since no setting names code to run"
    elif override.type is not OverrideType.CHANGE or override.package is not None:
        yield f"{text}: all settings exist already and are changed by name=value, without +, ~ or @"
    elif override.is_sweep_override() and not multirun:
        yield f"{text} gives several values: add -m to run one after the other, or write a list as [a,b]"
    elif key in groups:
        for name in _names(override):
            yield from choices.problems_of(key, name, groups[key])
    elif key not in keys:
        yield _unknown_key(key, keys)
    elif key == "stop_strings" and _has_other_than_text(override.value()):
        yield f"""{text}: quote items that are not plain words, as in stop_strings='["2.","true"]'"""


def _has_other_than_text(value: object) -> bool:
    return isinstance(value, list) and not all(isinstance(item, str) for item in value)


def _names(override: Override) -> list[str]:
    """Return the options of a group that the override names; none for a pattern, whose options always exist."""
    if not override.is_sweep_override():
        return [override.get_value_element_as_str().strip("'\"")]
    if override.is_choice_sweep() and "glob(" not in (override.input_line or ""):
        return [name.strip("'\"") for name in override.sweep_string_iterator()]
    return []


def groups_of() -> dict[str, list[str]]:
    """Return the options of every group that can be chosen on the command line."""
    names = [field.name for field in fields(RunConfig)] + [*BUNDLES]
    groups = {name: folders.names(name) for name in names if (folders.conf_dir() / name).is_dir()}
    groups["draft"] += catalogue.names()
    groups["task"] = [*task_specs()]  # those of plugins too
    return groups


def keys_of_run(overrides: Iterable[Override], groups: dict[str, list[str]]) -> frozenset[str]:
    """Return every dotted key; `task` and `draft` have the keys of the options that the overrides name."""
    overrides = list(overrides)
    chosen, tasks = _choices(overrides), chosen_tasks(overrides, groups)
    drafts = [_drafter_of_option(name) for group, name in chosen if group == "draft" and name in groups["draft"]]
    drafts = drafts or [drafters()[MODEL_DRAFT]]
    schemas = [(RunConfig, ""), *((task.config, "task.") for task in tasks)]
    schemas += [(draft.config, "draft.") for draft in drafts]
    keys = frozenset(key for schema, prefix in schemas for key in keys_of(schema, prefix)) - _DERIVED
    without_model = drafts and all(draft.make and not draft.has_model for draft in drafts)
    return frozenset(key for key in keys if not key.startswith("draft.model.")) if without_model else keys


def _drafter_of_option(name: str) -> DrafterRecord:
    """Return the kind that an option of `draft` has: its own name, else a model."""
    return drafters().get(name, drafters()[MODEL_DRAFT])


def _choices(overrides: Iterable[Override]) -> list[tuple[str, str]]:
    return [(override.key_or_group, name) for override in overrides for name in _names(override)]


def chosen_tasks(overrides: Iterable[Override], groups: dict[str, list[str]]) -> list[TaskSpec]:
    """Return the tasks that the overrides name, alone or in an experiment; else the default."""
    chosen, known = _choices(overrides), task_specs()
    named = [name for group, name in chosen if group == "task"]
    named = named or [_task_of(group, name) for group, name in chosen if group in BUNDLES and name in groups[group]]
    return [known[name] for name in named if name in known] or [known[default_of("config.yaml", "task")]]


def default_of(name: str, group: str) -> str:
    """Return the option of a group that a file of the package's `conf` chooses."""
    entry = folders.read(folders.conf_dir() / name)
    return next(str(part[group]) for part in entry["defaults"] if isinstance(part, dict) and group in part)


def _task_of(group: str, name: str) -> str:
    """Return the task that an experiment chooses; empty if it leaves the task open."""
    file = folders.find(group, name)
    defaults = folders.read(file).get("defaults", []) if file else []
    named = (part.get("override /task") for part in defaults if isinstance(part, dict))
    return next((str(name) for name in named if name), "")


def keys_of(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a tree of settings, with a prefix."""
    for name, hint in get_type_hints(schema).items():
        yield prefix + name
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and is_dataclass(kind) and kind is not ModelShape:
                yield from keys_of(kind, f"{prefix}{name}.")


def _unknown_key(key: str, keys: frozenset[str]) -> str:
    """Report an unknown key: similar keys, or the tasks that have this setting, with a prefix or without one."""
    similar = unknown_setting(key, keys, otherwise="--help all lists all settings")
    if any(known.endswith(f".{key}") for known in keys):
        return similar
    owners = [name for name, task in sorted(task_specs().items()) if _full_key(key, name) in keys_of_task(task)]
    if owners:
        return f"{key} has no effect here: it is a setting of task={' and task='.join(owners)}"
    if key.startswith("draft.model.") and key in keys_of(RunConfig, ""):
        return f"{key} has no effect without a draft model: give one with draft=NAME"
    return similar


def _full_key(key: str, task: str) -> str:
    return f"task.{key.removeprefix('task.').removeprefix(f'{task}.')}"


def keys_of_task(task: TaskSpec) -> frozenset[str]:
    """Return the dotted keys of a task's own settings."""
    return frozenset(keys_of(task.config, "task.")) - _DERIVED


def one_sentence(error: Exception) -> str:
    """Put the error of Hydra or OmegaConf and its cause on one line."""
    if isinstance(error, OverrideParseException):
        return unreadable(error.override.removeprefix("++"))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        place, found, _ = str(error).partition(": Could not find")  # In 'experiment/mine'
        return f"{place if found else group}: {unknown_name(group, name, error.options)}"
    # OmegaConf quotes values, which may span lines, before its `full_key`.
    whole, found, _ = str(error).partition("\n    full_key: ")
    message = " ".join(whole.split()) if found else whole.splitlines()[0].rstrip(".")
    message = message.removeprefix("Error merging override ")
    if error.__cause__ is None:
        return message
    cause = str(error.__cause__).splitlines()[0]
    return f"{message}: a list is written [a,b]" if "ListConfig" in cause else f"{message}: {cause}"
