"""From the words of a command line to the dataclasses of `schema`: the only module that knows Hydra.

Hydra composes the options that the words choose, such as `model=7B`, from the files in `conf` and those of the user.
Every other word sets a value in the result, so that all mistakes are reported at once.
"""

import os
import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import filterfalse, product
from typing import Any, cast, get_args, get_type_hints

from hydra import compose as compose_options
from hydra import initialize_config_dir
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

from llama_ssp.errors import ConfigError, one_message, unknown_name
from llama_ssp.settings import catalogue, folders, unknown
from llama_ssp.settings.drafters import ModelDraftConfig, drafter_of, drafters, problem_of
from llama_ssp.settings.schema import DEFAULT_DRAFT, MODEL_DRAFT, NO_DRAFT, DrafterConfig, PlanConfig, RunConfig
from llama_ssp.settings.slurm import SlurmConfig
from llama_ssp.settings.tasks import task_of, task_specs

_PROMPT, _STOPS = "prompt", "stop_strings"
_PATHS = {
    "run_dir", "prompts", "model.path", "model.manifest", "draft.model.path", "draft.model.manifest", "figure",
}  # fmt: skip
# Fields that follow from a group choice: task=, model= and draft= set them.
_DERIVED = {"task.name", "model.name", "model.shape", "draft.kind", "draft.model.name", "draft.model.shape"}
_LAUNCHER = ("hydra/launcher", "hydra.launcher")
_ESCAPES, _ESCAPED = re.compile(r"\\([nt\\])"), {"n": "\n", "t": "\t", "\\": "\\"}


@dataclass(frozen=True, kw_only=True)
class Composed:
    """The settings of one run.

    Attributes:
        settings: the words that set them, with full keys.
        explicit: the dotted keys and groups that they set.
        config: as Hydra composed it.
        launcher: settings of `hydra/launcher=slurm`; None without it.
    """

    settings: tuple[str, ...]
    explicit: frozenset[str]
    config: DictConfig
    launcher: SlurmConfig | None = None

    def to_yaml(self, *, resolve: bool = False) -> str:
        """The composed settings, with ${...} filled in if `resolve`."""
        with _sentences():
            return str(OmegaConf.to_yaml(self.config, resolve=resolve))


def compose(words: Sequence[str], *, multirun: bool = False, root: str = "config") -> list[Composed]:
    """Compose the settings of a run, or with `multirun` one for each combination of values.

    A setting of the chosen task needs no `task.`, and takes the task's name instead. The text of `prompt=TEXT` is
    everything after the sign, and so are paths, unless they are quoted, null or hold ${...}.

    Args:
        words: as typed.
        multirun: whether `a,b` are two values.
        root: file of `conf` to start from.

    Raises:
        ConfigError: lists every word that cannot be read, and every name and value that is wrong.
    """
    register(root)
    with _sentences(), initialize_config_dir(str(folders.conf_dir()), version_base="1.3"):
        groups = groups_of(root)
        read = [(text, _read(text, multirun=multirun)) for text in words]
        problems = unknown.unread_words([text for text, word in read if word is None])
        values = []
        for _, word in read:
            if word and not (found := [*_problems(word, groups, multirun=multirun)]):
                values.append([*_values(word)])
            elif word:
                problems += found
        options: dict[tuple[str, ...], DictConfig] = {}
        composed = [_compose(chosen, groups, root, options, problems, multirun=multirun) for chosen in product(*values)]
    if problems:
        raise ConfigError(one_message([*dict.fromkeys(problems)]))
    return composed


@dataclass(frozen=True, kw_only=True)
class _Word:
    """A word of the command line; `override` is what Hydra's grammar makes of it, None for a literal text."""

    text: str
    key: str
    override: Override | None = None


def _read(text: str, *, multirun: bool = False) -> _Word | None:
    """Read a word; None if it is no setting."""
    key, sign, value = text.partition("=")
    if sign and (key == _PROMPT or (_is_path(key) and _is_literal(value, multirun=multirun))):
        return _Word(text=text, key=key)
    try:
        (override,) = parser().parse_overrides([text])
    except HydraException:
        return None
    return _Word(text=text, key=override.key_or_group, override=override)


def parser() -> OverridesParser:
    """Hydra's grammar; patterns such as glob(llama*) need it to be initialized."""
    hydra = GlobalHydra.instance()
    return OverridesParser.create(hydra.config_loader() if hydra.is_initialized() else None)


def _is_path(key: str) -> bool:
    own = {name for task in task_specs().values() for name in task.paths}
    return key in _PATHS or key.rpartition(".")[2] in own


def _is_literal(value: str, *, multirun: bool) -> bool:
    is_one = not (multirun and "," in value)
    return value not in {"", "null"} and not value.startswith(("'", '"')) and "${" not in value and is_one


def _problems(word: _Word, groups: Mapping[str, Sequence[str]], *, multirun: bool) -> Iterator[str]:
    """Yield why a word is refused whatever the other words are."""
    text, key, override = word.text, word.key, word.override
    if override is None:
        return
    if "_target_" in text:
        yield f"{text}: _target_ is refused, since no setting names code to run"
    elif override.is_hydra_override():
        if key.startswith(_LAUNCHER) and not multirun:
            yield (
                f"{key} is for sweeps: add -m to submit a job per point, or submit a single job with "
                "sbatch launch/slurm.sbatch"
            )
    elif override.type is not OverrideType.CHANGE or override.package is not None:
        yield f"{text}: all settings exist already and are changed by name=value, without +, ~ or @"
    elif override.is_sweep_override() and not (multirun and override.is_discrete_sweep()):
        ways = "separate values by commas" if multirun else "add -m to run one after the other"
        yield f"{text} gives several values: {ways}, or write a list as [a,b]"
    elif key in groups:
        yield from (each for name in _names(override) for each in unknown.problems_of_option(key, name, groups[key]))
    elif key == _STOPS and not all(isinstance(item, str) for item in _items(override)):
        yield f"""{text}: quote items that are not plain words, as in stop_strings='["2.","true"]'"""


def _items(override: Override) -> list[Any]:
    value = override.value()
    return value if isinstance(value, list) else []


def _names(override: Override) -> list[str]:
    """Name the options that a word chooses; none for a pattern, whose options always exist."""
    if not override.is_sweep_override():
        return [override.get_value_element_as_str().strip("'\"")]
    is_pattern = "glob(" in (override.input_line or "")
    return [] if is_pattern else [name.strip("'\"") for name in override.sweep_string_iterator()]


def _values(word: _Word) -> Iterator[_Word]:
    """Yield the word once for each of its values."""
    if word.override is None or not word.override.is_sweep_override():
        yield word
        return
    for value in word.override.sweep_string_iterator():
        if each := _read(f"{word.key}={value}"):
            yield each


def _compose(
    words: Sequence[_Word],
    groups: Mapping[str, Sequence[str]],
    root: str,
    options: dict[tuple[str, ...], DictConfig],
    problems: list[str],
    *,
    multirun: bool,
) -> Composed:
    """Compose one combination of values, and note what is wrong with it in `problems`."""
    chosen = tuple(word.text for word in words if word.key in groups or _is_for_hydra(word))
    if chosen not in options:
        of_hydra = any(_is_for_hydra(word) for word in words)
        options[chosen] = compose_options(root, [*chosen], return_hydra_config=of_hydra)
    config = deepcopy(options[chosen]) if multirun else options[chosen]
    keys, settings, explicit = frozenset(keys_of(config)), [], []
    for word in filterfalse(_is_for_hydra, words):
        key = word.key
        if word.text not in chosen:
            key = _full_key(word.key, config, keys)
            if problem := _set(config, key, word, keys):
                problems.append(problem)
        explicit.append(key)
        settings.append(f"{key}{word.text[len(word.key) :]}")
    launcher = config.hydra.launcher if "hydra" in config else None
    if launcher is not None:
        with read_write(config), open_dict(config):
            launcher = OmegaConf.to_object(launcher)
            del config["hydra"]
    return Composed(
        settings=tuple(settings), explicit=frozenset(explicit), config=config,
        launcher=launcher if isinstance(launcher, SlurmConfig) else None,
    )  # fmt: skip


def _is_for_hydra(word: _Word) -> bool:
    return word.override is not None and word.override.is_hydra_override()


def keys_of(config: DictConfig) -> set[str]:
    """Return every dotted key that a word can set."""
    return {*_keys(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False)))} - _DERIVED


def _keys(part: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in part.items():
        yield prefix + name
        if isinstance(value, Mapping) and name not in {"shape", "hydra"}:
            yield from _keys(value, f"{prefix}{name}.")


def _full_key(key: str, config: DictConfig, keys: frozenset[str]) -> str:
    """Complete the key of a setting of the chosen task; settings of the run, and unknown ones, are as they are."""
    if key in keys:
        return key
    full = f"task.{key.removeprefix(f'{config.task.name}.')}"
    return full if full in keys else key


def _set(config: DictConfig, key: str, word: _Word, keys: frozenset[str]) -> str | None:
    """Set a value; returns the problem if there is one."""
    is_figure = key.startswith("hardware.") and bool(config.get("hardware"))
    if key not in keys and not is_figure:
        return _unknown_key(key, keys)
    try:
        OmegaConf.update(config, key, _value_of(word), merge=True, force_add=is_figure or key == "prices")
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        cause = str(error).splitlines()[0]
        return f"{key}{word.text[len(word.key) :]}: {'a list is written [a,b]' if 'ListConfig' in cause else cause}"
    return None


def _value_of(word: _Word) -> Any:  # noqa: ANN401 - whatever OmegaConf takes
    """Return the value of a word, with ${...} of texts taken literally."""
    if word.override is None:
        return _escaped(word.text.partition("=")[2])
    value = word.override.value()
    if word.key == _STOPS and isinstance(value, list):
        return [_escaped(text) for text in value]
    return value


def _escaped(text: str) -> str:
    """Keep OmegaConf from filling in ${...}, after doubling the backslashes already there."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _unknown_key(key: str, keys: frozenset[str]) -> str:
    """Report an unknown key: similar keys, or the tasks that have this setting, with a prefix or without one."""
    similar = unknown.unknown_setting(key, keys, otherwise="--help all lists all settings")
    if any(known.endswith(f".{key}") for known in keys):
        return similar
    name_of = {name: key.removeprefix("task.").removeprefix(f"{name}.") for name in task_specs()}
    owners = [
        name
        for name, task in sorted(task_specs().items())
        if name_of[name] in {each.name for each in fields(task.config)} - {"name"}
    ]
    if owners:
        return f"{key} has no effect here: it is a setting of task={' and task='.join(owners)}"
    if key.removeprefix("draft.") in keys and key.startswith("draft.model."):
        return f"{key} has no effect without a draft model: give one with draft=NAME"
    return similar


def groups_of(root: str = "config") -> dict[str, list[str]]:
    """Return the options of every group that can be chosen: those of the defaults list of a file of `conf`."""
    defaults = folders.read(folders.conf_dir() / f"{root}.yaml")["defaults"]
    names = [name for part in defaults if isinstance(part, dict) for name in part if " " not in name]
    groups = {name: folders.names(name) for name in names}
    groups["draft"] += catalogue.names()
    groups["task"] = [*task_specs()]  # those of plugins too
    return groups


@contextmanager
def _sentences() -> Iterator[None]:
    """Raise what Hydra and OmegaConf have found as a ConfigError of one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_sentence(error)) from error


def one_sentence(error: Exception) -> str:
    """Put the error of Hydra or OmegaConf and its cause on one line."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        place, found, _ = str(error).partition(": Could not find")  # In 'experiment/mine'
        return f"{place if found else group}: {unknown_name(group, name, error.options)}"
    # OmegaConf quotes values, which may span lines, before its `full_key`.
    whole, found, _ = str(error).partition("\n    full_key: ")
    message = " ".join(whole.split()) if found else whole.splitlines()[0].rstrip(".")
    message = message.removeprefix("Error merging override ")
    return message if error.__cause__ is None else f"{message}: {str(error.__cause__).splitlines()[0]}"


def to_run_config(config: DictConfig, *, explicit: frozenset[str]) -> RunConfig:
    """Turn a composed config into a `RunConfig` or `PlanConfig`, resolve the draft, and let the task fill in.

    Of the dotted keys that the user gave, those below `draft` apply to the default draft too. The result's
    `draft.kind` is never `default`, and its `draft.model` is null for kinds without a model.

    Raises:
        ConfigError: the default draft is unknown, a group of settings is a plain value, or a value is missing.
    """
    if config.draft.kind == DEFAULT_DRAFT:
        config.draft = _default_draft(config, explicit)
    if not problem_of(config.draft.kind) and not drafter_of(config.draft).has_model:
        config.draft.model = None
    with _sentences():
        try:
            run = cast("RunConfig", OmegaConf.to_object(config))
        except MissingMandatoryValue as error:
            raise ConfigError(f"{error.full_key}=??? stands for a value that is still missing: give one") from None
    _check_groups(run)
    # A shell makes line ends and tabs hard to write.
    run.stop_strings = [_ESCAPES.sub(lambda escape: _ESCAPED[escape[1]], text) for text in run.stop_strings]
    task_of(run).fill_in(run, explicit)
    return run


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
    """Return the default draft of the target's entry, with the user's settings applied."""
    name = config.model.default_draft
    if name is None:
        return cast("DictConfig", OmegaConf.structured(DrafterConfig(kind=NO_DRAFT)))
    draft: DictConfig = OmegaConf.structured(ModelDraftConfig(kind=MODEL_DRAFT, model=catalogue.load(name)))
    for key in explicit:
        if key.startswith("draft."):
            OmegaConf.update(draft, key.removeprefix("draft."), OmegaConf.select(config, key))
    return draft


def register(root: str = "config") -> None:
    """Register with Hydra what a file in `conf` and the options refer to; repeated calls are harmless."""
    schemas: Iterable[tuple[str, Any]] = [
        ("plan", PlanConfig) if root == "plan" else ("run", RunConfig),
        ("slurm", SlurmConfig),
        *((name, task.config) for name, task in task_specs().items()),
        *((f"draft_{name}", draft.config) for name, draft in drafters().items()),
    ]
    for name, node in schemas:
        ConfigStore.instance().store(group="schema", name=name, node=node)
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)
    plugins = Plugins.instance()
    if OptionFolders not in plugins.discover(SearchPathPlugin):
        plugins.register(OptionFolders)
        plugins.register(ModelOptions)


@cache
def run_id() -> str:
    """Name this run: $RUN_ID, else the SLURM job, else torchrun's run id, else the current time.

    The clocks of ranks can differ by a second, so all ranks use the folder that rank 0 creates.
    """
    if name := os.environ.get("RUN_ID"):
        return name
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return time.strftime("%Y-%m-%d_%H-%M-%S") if elastic == "none" else elastic


class OptionFolders(SearchPathPlugin):
    """Puts the user's folders before the package's, and `ModelOptions` behind both."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path that Hydra has made; Hydra itself appends the schemas."""
        for folder in folders.own_folders():
            search_path.prepend("user", f"file://{folder}", anchor="main")
        search_path.append("models", f"{ModelOptions.scheme()}://")


class ModelOptions(ConfigSource):
    """Options without a file: models of the catalogue as drafts, and ids of the hub; made when they are asked for."""

    @staticmethod
    def scheme() -> str:
        """Return the name of this kind of source."""
        return "models"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the option at a path such as `model/owner/name`."""
        group, name = _split(config_path)
        of_draft = {"defaults": [f"/schema/draft_{MODEL_DRAFT}@_here_", {"/model@model": name}, "_self_"]}
        option = of_draft | {"kind": MODEL_DRAFT} if group == "draft" else {"name": name, "hub_id": name}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=OmegaConf.create(option), header={"package": None}
        )

    def is_group(self, config_path: str) -> bool:
        """Whether options of a group can be listed here."""
        return config_path.strip("/") == "draft"

    def is_config(self, config_path: str) -> bool:
        """Whether a path is that of a model."""
        group, name = _split(config_path)
        is_known = group == "draft" and name in catalogue.names()
        return is_known or (group in folders.GROUPS and folders.is_hub_id(name))

    def available(self) -> bool:
        """Return True: nothing is read from the hub here."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:  # noqa: ARG002
        """List the models of the catalogue as drafts."""
        return catalogue.names() if self.is_group(config_path) else []


def _split(config_path: str) -> tuple[str, str]:
    """Split a path into its group and its name."""
    group, _, name = config_path.removesuffix(".yaml").partition("/")
    return group, name
