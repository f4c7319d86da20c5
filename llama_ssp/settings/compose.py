"""Turns the words of a command line into the dataclasses of `schema`: the only module that knows Hydra.

Hydra composes the options that the words choose, such as `model=7B`, which `catalogue` reads for it. Every other word
sets a value in the result, so that all mistakes are reported at once.
"""

import io
import os
import re
import sys
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import product
from typing import Any, cast, get_args, get_type_hints

from hydra import compose as compose_options
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from llama_ssp import catalogue
from llama_ssp.catalogue import GGUF, GGUF_ALONE, GROUPS, LOCAL, ModelConfig, is_folder, is_hub_id
from llama_ssp.errors import ConfigError, refuse, similar_name, unknown_name
from llama_ssp.machines import hardware
from llama_ssp.manifest import absent
from llama_ssp.registry import PLUGINS
from llama_ssp.settings import schema
from llama_ssp.settings.aliases import counterparts
from llama_ssp.settings.draft_heads import heads_in_targets
from llama_ssp.settings.drafters import drafter_of, drafters, problem_of
from llama_ssp.settings.extensions import MORE, whole
from llama_ssp.settings.launchers import LAUNCHERS
from llama_ssp.settings.schema import DERIVED, MODEL_DRAFT, DrafterConfig, PlanConfig, RunConfig
from llama_ssp.settings.tasks import task_of, task_specs

_STOPS, _GREEDY = "stop_strings", "sampling=greedy"
_PATHS = {"run_dir", "prompts", "model.path", "draft.model.path"}
_OPEN = {"chat_arguments": "{enable_thinking: false}", "sampling.logit_bias": "{198: -2.5}"}  # have keys of their own
_QUOTES = "'\""
_MISSING = re.compile(r"\\*\?\?\?")  # stands for a missing value; a prompt of these signs gets one backslash more
_ESCAPES, _ESCAPED = re.compile(r"\\([nt\\])"), {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, kw_only=True)
class Composed:
    """The settings of one run."""

    settings: tuple[str, ...]  # the words that set them, with full keys.
    explicit: frozenset[str]  # the dotted keys and groups that they set.
    config: DictConfig  # as Hydra composed it.
    launcher: object = None  # settings of `hydra/launcher`, by default Hydra's own; None if no word is for Hydra.

    def to_yaml(self, *, resolve: bool = False) -> str:
        """The composed settings, with ${...} filled in if `resolve`."""
        with _sentences():
            return str(OmegaConf.to_yaml(self.config, resolve=resolve))


Known = dict[frozenset[str], DictConfig]
"""Compositions by Hydra of the words that choose options, by these words; the last word of a group counts."""


def compose(
    words: Sequence[str], *, multirun: bool = False, root: str = "config", known: Known | None = None
) -> list[Composed]:
    """Compose the settings of a run; with `multirun`, those of a run for each combination of values.

    A plan with several machines gives settings for each. In words, a setting of the chosen task can be written without
    `task.` or with the task's name in its place. The value of `prompt=TEXT`, and of a path, is the whole text after the
    equals sign, unless it is quoted, null or contains ${...}.

    Args:
        words: the words of the command line; one ConfigError lists all that is wrong with them.
        multirun: whether a word can have several values.
        root: the file of `conf` to start from.
        known: keeps chosen options for more calls with the same root, which then take a fifth of the time.
    """
    register(root)
    with _sentences(), initialize_config_dir(str(catalogue.conf_dir()), version_base="1.3"):
        groups = groups_of(root)
        read = [(text, _read(text, multirun=multirun)) for text in words]
        problems = _unread([text for text, word in read if word is None])
        values = []
        for word in filter(None, (word for _, word in read)):
            sweeps = multirun or (root, word.key) == ("plan", "hardware")
            found = [*_problems(word, groups, root=root, multirun=multirun, sweeps=sweeps)]
            problems += found
            values += [] if found else [_values(word)]
        options: Known = {} if known is None else known
        composed = []
        for choice in product(*values):
            expanded = [part for word in choice for part in _expanded(word)]
            chosen = tuple(word.text for word in expanded if word.key in groups or word.is_for_hydra)
            last = frozenset({text.partition("=")[0]: text for text in chosen}.values())
            if last not in options:
                of_hydra = any(word.is_for_hydra for word in expanded)
                options[last] = compose_options(root, [*chosen], return_hydra_config=of_hydra)
            composed.append(_composed(deepcopy(options[last]), expanded, chosen, problems))
    refuse([*dict.fromkeys(problems)])
    return composed


@dataclass(frozen=True, kw_only=True)
class _Word:
    """A word of the command line; `override` is what Hydra's grammar makes of it, None for a literal text."""

    text: str
    key: str
    override: Override | None = None

    @property
    def is_for_hydra(self) -> bool:
        return self.override is not None and self.override.is_hydra_override()


def _read(text: str, *, multirun: bool = False) -> _Word | None:
    """Read a word; None if it is no setting."""
    key, sign, value = text.partition("=")
    is_path = key in _PATHS or any(key in more.paths for more in MORE.all().values())
    is_path = is_path or any(key.rpartition(".")[2] in task.paths for task in task_specs().values())
    is_one = not (multirun and "," in value) and "${" not in value
    is_literal = value not in {"", "null"} and not value.startswith((*_QUOTES,)) and is_one
    if key in GROUPS and is_one and is_folder(value.strip(_QUOTES)):
        return _Word(text=f"{key}={value.strip(_QUOTES)}", key=key)
    if sign and (key == "prompt" or (is_path and is_literal)):
        return _Word(text=text, key=key)
    try:
        (override,) = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides([text])
    except HydraException:
        return None
    return _Word(text=text, key=override.key_or_group, override=override)


def _problems(
    word: _Word, groups: Mapping[str, Sequence[str]], *, root: str, multirun: bool, sweeps: bool
) -> Iterator[str]:
    """Yield what is wrong with a word regardless of other words; with `sweeps`, the word can have several values."""
    text, key, override = word.text, word.key, word.override
    if override is None:
        return
    if "_target_" in text:
        yield f"{text}: _target_ is refused, since no setting names code to run"
    elif word.is_for_hydra:
        if key.startswith(("hydra/launcher", "hydra.launcher")) and not multirun:
            yield (
                f"{key} is for sweeps: add -m to submit a job per point, or submit a single job with "
                "sbatch launch/slurm.sbatch"
            )
    elif override.type is not OverrideType.CHANGE or override.package is not None:
        yield f"{text}: all settings exist already and are changed by name=value, without +, ~ or @"
    elif override.is_sweep_override() and not (sweeps and override.is_discrete_sweep()):
        ways = "separate values by commas" if sweeps else "add -m to run one after the other"
        ways = ways if sweeps or root == "config" else "a plan takes several of hardware= alone, so give one"
        yield f"{text} gives several values: {ways}, or write a list as [a,b]"
    elif key in groups:
        names = [value.text.partition("=")[2].strip(" '\"") for value in _values(word) if value.override]
        yield from (problem for name in names for problem in _problems_of_option(key, name, groups[key]))
    elif key == _STOPS and isinstance(items := override.value(), list) and not all(isinstance(i, str) for i in items):
        yield f"""{text}: quote items that are not plain words, as in stop_strings='["2.","true"]'"""


def _values(word: _Word) -> list[_Word]:
    """Return the word once for each of its values."""
    if word.override is None or not word.override.is_sweep_override():
        return [word]
    return [*filter(None, (_read(f"{word.key}={value}") for value in word.override.sweep_string_iterator()))]


def _expanded(word: _Word) -> list[_Word]:
    """Return the word; or, if its value is the folder of a model, the two words that it is short for."""
    if word.override is not None or word.key not in GROUPS:
        return [word]
    folder = word.text.removeprefix(f"{word.key}=")
    model = "model" if word.key == "model" else f"{word.key}.model"
    return [*filter(None, map(_read, (f"{word.key}={LOCAL}", f"{model}.path={folder}")))]


def _composed(config: DictConfig, words: Sequence[_Word], chosen: Sequence[str], problems: list[str]) -> Composed:
    """Set values that the words give beyond the chosen options, and note in `problems` words that cannot be set."""
    keys, settings, explicit = frozenset(keys_of(config)), [], []
    for word in words:
        if word.is_for_hydra:
            continue
        key = word.key
        if word.text not in chosen:
            of_task = f"task.{key.removeprefix(f'{config.task.name}.')}"
            key = of_task if key not in keys and of_task in keys else key
            problems += _set(config, key, word, keys)
        explicit.append(key)
        settings.append(f"{key}{word.text[len(word.key) :]}")
    if _GREEDY in chosen and (temperature := config.sampling.temperature):
        problems.append(f"{_GREEDY} is temperature 0, and sampling.temperature={temperature} was given: leave one out")
    launcher = None
    if "hydra" in config:
        with read_write(config), open_dict(config):
            launcher = OmegaConf.to_object(config.hydra.launcher)
            del config["hydra"]
    return Composed(settings=tuple(settings), explicit=frozenset(explicit), config=config, launcher=launcher)


def keys_of(config: DictConfig) -> set[str]:
    """Return every dotted key that a word can set."""
    return {*_keys(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False)))}.difference(DERIVED)


def _keys(part: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in part.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and name not in {"shape", "hydra"}:
            yield from _keys(value, f"{prefix}{name}.")


def _set(config: DictConfig, key: str, word: _Word, keys: frozenset[str]) -> Iterator[str]:
    """Set a value, or yield why that is not possible; in texts, ${...} is taken literally."""
    is_figure = (key.startswith("hardware.") and bool(config.get("hardware"))) or key.startswith("chat_arguments.")
    if key not in keys and not is_figure:
        yield _unknown_key(key, keys)
        return
    text = word.text[len(word.key) :]
    value = _escaped(text[1:]) if word.override is None else word.override.value()
    if key == "prompt" and isinstance(value, str) and _MISSING.fullmatch(value):
        value = f"\\{value}"
    if key == _STOPS and isinstance(value, list):
        value = [*map(_escaped, value)]
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=is_figure or key in _OPEN)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        cause = str(error).splitlines()[0]
        written = f"write it in quotes, as in '{key}={_OPEN[key]}'" if key in _OPEN else "a list is written [a,b]"
        yield f"{key}{text}: {written if key in _OPEN or 'ListConfig' in cause else cause}"


def _escaped(text: str) -> str:
    """Keep OmegaConf from filling in ${...}, after doubling the backslashes already there."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def groups_of(root: str = "config") -> dict[str, list[str]]:
    """Return the options of every group in the defaults list of a file of `conf`."""
    defaults = catalogue.read(catalogue.conf_dir() / f"{root}.yaml")["defaults"]
    names = [name for part in defaults if isinstance(part, dict) for name in part if " " not in name]
    groups = {name: catalogue.names(name) for name in names}
    groups["draft"] += catalogue.names("model")
    groups["task"] = [*task_specs()]  # tasks of plugins too
    return groups


@contextmanager
def _sentences() -> Iterator[None]:
    """Raise errors of Hydra and OmegaConf as a ConfigError of one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        place, found, _ = str(error).partition(": Could not find")  # In 'experiment/mine'
        return f"{place if found else group}: {unknown_name(group, name, error.options)}"
    # OmegaConf quotes values, which may span lines, before its `full_key`.
    whole, found, _ = str(error).partition("\n    full_key: ")
    message = " ".join(whole.split()) if found else whole.splitlines()[0].rstrip(".")
    message = message.removeprefix("Error merging override ")
    if "Could not load 'schema/" in message:
        message += f": no record has registered it; {PLUGINS} names the modules that do"
    return message if error.__cause__ is None else f"{message}: {str(error.__cause__).splitlines()[0]}"


def to_run_config(composed: Composed) -> RunConfig:
    """Turn composed settings into a `RunConfig` or `PlanConfig`, resolve the draft, and let the task fill in.

    The user's dotted keys below `draft` apply to the default draft too. The result's
    `draft.kind` is never `default`, and its `draft.model` is null for kinds without a model. An unknown default draft,
    a plain value in place of a group of settings, and a missing value raise ConfigError.
    """
    config, explicit = composed.config, composed.explicit
    if config.draft.kind == schema.DEFAULT_DRAFT:
        config.draft = _default_draft(config, explicit)
    if not problem_of(config.draft.kind) and not drafter_of(config.draft).has_model:
        OmegaConf.update(config, "draft.model", None, merge=False)
    with _sentences():
        try:
            run = cast("RunConfig", OmegaConf.to_object(config))
        except MissingMandatoryValue as error:
            raise ConfigError(f"{error.full_key}=??? stands for a value that is still missing: give one") from None
    _check_groups(run)
    # A shell makes line ends and tabs hard to write.
    stop_strings = [_ESCAPES.sub(lambda escape: _ESCAPED[escape[1]], text) for text in run.stop_strings]
    from_model = [name for name in run.sampling.from_model if f"sampling.{name}" not in explicit]
    if run.prompt is not None and _MISSING.fullmatch(run.prompt):
        run = replace(run, prompt=run.prompt[1:])
    run = replace(run, stop_strings=stop_strings, sampling=replace(run.sampling, from_model=from_model))
    return task_of(run).fill_in(run, explicit)


def _check_groups(part: object, prefix: str = "") -> None:
    """Refuse a text or a number where a group is required; an interpolation can put one there."""
    for name, hint in get_type_hints(type(part)).items():
        value = getattr(part, name)
        if is_dataclass(value):
            _check_groups(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float) and any(is_dataclass(kind) for kind in (hint, *get_args(hint))):
            raise ConfigError(
                f"{prefix}{name}={textwrap.shorten(str(value), 60)} must be settings: "
                f"set them one by one as {prefix}{name}.KEY=VALUE"
            )


def _default_draft(config: DictConfig, explicit: frozenset[str]) -> DictConfig:
    """The default draft of the target's entry, with the user's settings applied."""
    name = config.model.default_draft
    kind = DrafterConfig(kind=schema.NO_DRAFT)
    if name:
        kind = drafters()[MODEL_DRAFT].settings(kind=MODEL_DRAFT, model=catalogue.load(name))
    draft: DictConfig = OmegaConf.structured(kind)
    for key in explicit:
        if name and key.startswith("draft."):
            OmegaConf.update(draft, key.removeprefix("draft."), OmegaConf.select(config, key))
    return draft


_registered: dict[str, tuple[type, type | None]] = {}
"""Schemas that Hydra has, by name: the class of the settings, and of the model in them."""


def register(root: str = "config") -> None:
    """Register with Hydra all that files in `conf` and options refer to; repeated calls are harmless."""
    schemas: dict[str, Any] = {"plan": whole(PlanConfig)} if root == "plan" else {"run": whole(RunConfig)}
    schemas |= {name: launcher.config for name, launcher in LAUNCHERS.all().items()}
    schemas |= {name: task.config for name, task in task_specs().items()}
    schemas |= {f"draft_{name}": draft.settings for name, draft in drafters().items()}
    with_models = {"run", "plan", *(f"draft_{name}" for name, draft in drafters().items() if draft.has_model)}
    for name, settings in schemas.items():
        kinds = (settings, whole(ModelConfig) if name in with_models else None)
        if _registered.get(name) == kinds:
            continue
        node = OmegaConf.structured(settings)
        if kinds[1]:
            node["model"] = OmegaConf.structured(kinds[1])
        ConfigStore.instance().store(group="schema", name=name, node=node)
        _registered[name] = kinds
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)
    plugins = Plugins.instance()
    if _SearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(_SearchPath)
        plugins.register(_Options)


COMPLETIONS = ["=".join(words) for words in product(("install", "uninstall", "query"), ("bash", "zsh", "fish"))]
"""The questions of a shell that completes names with Tab."""


def complete(question: str) -> None:
    """Let Hydra print a script for the shell, or the candidates for the line in COMP_LINE; nothing if it cannot."""
    register()
    os.environ["COMP_LINE"] = re.sub(r"(llama-ssp) +run\b", r"\1", os.environ.get("COMP_LINE", ""), count=1)
    sys.argv[1:] = ["--shell-completion", question]
    with suppress(Exception, SystemExit), redirect_stderr(io.StringIO()):
        hydra_main(config_path=str(catalogue.conf_dir()), config_name="config", version_base="1.3")(lambda _: None)()


@cache
def run_id() -> str:
    """Name this run: $RUN_ID, which launch/slurm.sbatch sets, else torchrun's run id, else the current time.

    The clocks of ranks can differ by a second, so all ranks use the folder that rank 0 creates.
    """
    if name := os.environ.get("RUN_ID"):
        return name
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return time.strftime("%Y-%m-%d_%H-%M-%S") if elastic == "none" else elastic


class _SearchPath(SearchPathPlugin):
    """Replaces the folder of options by `_Options`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = f"{_Options.scheme()}://"  # Hydra finds the folder in the element alone


class _Options(ConfigSource):
    """Options as `catalogue` reads them; models of the catalogue are drafts too, and so are ids of the hub."""

    @staticmethod
    def scheme() -> str:
        return "catalogue"

    def load_config(self, config_path: str) -> ConfigResult:
        group, name = _parts(config_path)
        package, option = None, dict[str, Any](name=name, hub_id=name)
        if found := catalogue.option(group, name):
            option, package = found
        elif group == "draft":
            defaults = [f"/schema/draft_{MODEL_DRAFT}@_here_", {"/model@model": name}, "_self_"]
            option = {"defaults": defaults, "kind": MODEL_DRAFT}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(option), header={"package": package}
        )

    def is_group(self, config_path: str) -> bool:
        return any((folder / config_path).is_dir() for folder in catalogue.folders())

    def is_config(self, config_path: str) -> bool:
        group, name = _parts(config_path)
        is_draft = group == "draft" and name in catalogue.names("model")
        is_file = catalogue.find(group, name) or (group == "hardware" and catalogue.option(group, name))
        return is_draft or bool(is_file) or (group in GROUPS and is_hub_id(name))

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        group = config_path.strip("/")
        drafts = catalogue.names("model") if group == "draft" else []
        names = [*catalogue.names(group), *drafts] if results_filter is not ObjectType.GROUP else []
        return names + (catalogue.groups(group) if results_filter is not ObjectType.CONFIG else [])


def _parts(config_path: str) -> tuple[str, str]:
    """The group and the name of an option, such as `draft` and `owner/name`."""
    group, sign, name = config_path.removesuffix(".yaml").partition("/")
    return (group, name) if sign else ("", group)


def _unknown_key(key: str, keys: frozenset[str]) -> str:
    """Report an unknown key: similar keys, or the tasks that have this setting, with a prefix or without one."""
    if not any(known.endswith(f".{key}") for known in keys):
        names = {name: key.removeprefix("task.").removeprefix(f"{name}.") for name in task_specs()}
        owners = [
            name
            for name, task in sorted(task_specs().items())
            if names[name] != "name" and any(setting.name == names[name] for setting in fields(task.config))
        ]
        if owners:
            return f"{key} has no effect here: it is a setting of task={' and task='.join(owners)}"
        if key.removeprefix("draft.") in keys and key.startswith("draft.model."):
            return f"{key} has no effect without a draft model: give one with draft=NAME"
    last = key.rpartition(".")[2]
    if sentence := absent("setting", key) or absent("setting", last):
        return sentence
    if counterpart := counterparts().get(last):
        return f"unknown setting {key!r}: {counterpart.sentence}"
    last_words = {name.rpartition(".")[2]: name for name in sorted(keys, key=len, reverse=True)}
    similar = similar_name(last, last_words)
    close = dict.fromkeys(filter(None, [similar_name(key, keys), similar and last_words[similar]]))
    hint = f"did you mean {' or '.join(close)}?" if close else "--help all lists all settings"
    return f"unknown setting {key!r}: {hint}"


def _unread(words: Sequence[str]) -> list[str]:
    """Return problems of words that are no settings: one for all if they are only names, else one for each."""
    if words and (settings := as_settings(words)):
        return [f"{' '.join(words)!r} names no settings: write {settings}"]
    return [
        f"cannot read {text!r}: settings are written name=value, and a value with brackets, quotes or commas "
        "needs quotes of its own inside those of the shell"
        for text in words
    ]


def as_settings(words: Sequence[str]) -> str | None:
    """Names alone, such as `compare 30B 7B`, as settings; None if one of the words is no name."""
    settings, roles = [], ["model", "draft"]
    tasks = {name: f"task={name}" for name in task_specs()}
    tasks |= {name: settings for task in task_specs().values() for name, settings in task.former.items()}
    for word in words:
        if word in tasks:
            settings.append(tasks[word])
        elif roles and (word in catalogue.names("model") or word == "none" or is_folder(word)):
            settings.append(f"{roles.pop(0)}={word}")
        else:
            return None
    return " ".join(settings)


def _problems_of_option(group: str, name: str, known: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with an option of a group: its name, or the user's file; `known` has no ids of the hub."""
    try:
        of_targets = [kind.name for kind in heads_in_targets() if name in kind.other_names]
        if of_targets and group == "draft" and name not in known:
            yield f"draft={name} is draft={of_targets[0]} here: give that"
        elif group == "hardware":
            hardware.load(name)
        elif name not in known and group in GROUPS:
            yield from _unknown_model(group, name, known)
        elif name not in known:
            yield unknown_name(group, name, known)
        elif group in GROUPS and name in catalogue.names("model"):
            catalogue.load(name)
        elif file := catalogue.find(group, name):
            catalogue.read(file)
    except ConfigError as error:
        yield str(error)


def _unknown_model(group: str, name: str, known: Collection[str]) -> Iterator[str]:
    if "/" not in name and is_folder(f"./{name}"):
        yield f"{group}={name} is a folder here: give {group}=./{name}"
    elif "/" not in name:
        sentence = unknown_name(group, name, known)
        yield sentence if similar_name(name, known) else f"{sentence}; {group}=owner/name takes a model of the hub"
    elif name.endswith(GGUF):
        yield f"{group}={name} {GGUF_ALONE}"
    elif not is_hub_id(name):
        yield (
            f"{group}={name} is neither a name of the catalogue, nor a folder that exists, nor an id of the hub, "
            "owner/name: another one is required"
        )
