"""Hydra's view of the config: registers schemas, drafts and resolvers, and turns what it composed into dataclasses.

Nothing below `launch` sees a DictConfig. The files in `conf` hold the values; this module only adds what files cannot
say: their types, one `draft` option per model, and names that depend on the process.
"""

import os
import re
import textwrap
import time
from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import cache
from typing import cast, get_args, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from llama_ssp.config import catalogue, hardware
from llama_ssp.config.drafts.drafter import drafter_of, drafters, problem_of
from llama_ssp.config.schema import DEFAULT_DRAFT, MODEL_DRAFT, NO_DRAFT, DrafterConfig, RunConfig
from llama_ssp.config.slurm import SlurmConfig
from llama_ssp.config.tasks.spec import task_specs
from llama_ssp.errors import ConfigError

_ESCAPES, _ESCAPED = re.compile(r"\\([nt\\])"), {"n": "\n", "t": "\t", "\\": "\\"}
"""What a shell makes hard to write."""

BUNDLES = ("experiment", "debug")
"""Groups whose options are settings of several others at once."""


def register() -> None:
    """Tell Hydra what the files in `conf` refer to; must precede every composition, and may be repeated."""
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    store.store(group="schema", name="slurm", node=SlurmConfig)
    for name, task in task_specs().items():
        store.store(group="schema", name=name, node=task.config)
    for name, draft in drafters().items():
        store.store(group="schema", name=f"draft_{name}", node=draft.config)
    for name in catalogue.names():
        option = {"defaults": [{"/model@model": name}, "_self_"], "kind": MODEL_DRAFT}
        store.store(group="draft", name=name, node=option)
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)
    OmegaConf.register_new_resolver("hardware_names", lambda: _in_lines(hardware.names(), indent=35), replace=True)
    OmegaConf.register_new_resolver("model_names", lambda: _in_lines(catalogue.names(), indent=2), replace=True)


def _in_lines(names: Iterable[str], *, indent: int) -> str:
    """The entries of a catalogue as the help text shows them, from column `indent` on."""
    lines = textwrap.wrap(" ".join(names), width=118 - indent, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)


@cache
def run_id() -> str:
    """Name this run: $RUN_ID, else the SLURM job, else torchrun's run id, else the time of day.

    Ranks that read a clock can differ by a second, so the folder that rank 0 makes of it counts for all.
    """
    if name := os.environ.get("RUN_ID"):
        return name
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"slurm-{job}"
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return time.strftime("%Y-%m-%d_%H-%M-%S") if elastic == "none" else elastic


def to_run_config(config: DictConfig, *, explicit: frozenset[str]) -> RunConfig:
    """Turn what Hydra composed into dataclasses, with the draft decided.

    Args:
        config: composed from `conf/config.yaml`.
        explicit: dotted keys that the user gave; those below `draft.model` hold for the default draft too.

    Returns:
        A config whose `draft.kind` is a kind of `config.drafts`, never `default`; `draft.model` is null for kinds
        without a model.

    Raises:
        ConfigError: the model's default draft is not in the catalogue, a group of settings was given a value, or a
            value is missing.
    """
    if config.draft.kind == DEFAULT_DRAFT:
        config.draft = _default_draft(config, explicit)
    if not problem_of(config.draft.kind) and not drafter_of(config.draft).has_model:
        config.draft.model = None
    try:
        run = cast("RunConfig", OmegaConf.to_object(config))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}=??? stands for a value that is still missing: give one") from None
    _check_groups(run)
    run.stop_strings = [_ESCAPES.sub(_unescaped, text) for text in run.stop_strings]
    return run


def _unescaped(escape: re.Match[str]) -> str:
    return _ESCAPED[escape[1]]


def _check_groups(part: object, prefix: str = "") -> None:
    """Refuse a text or a number in place of settings: OmegaConf lets an interpolation put one there."""
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
    """Return the draft that the target's entry names, with what the user said of it."""
    name = config.model.default_draft
    if name is None:
        return cast("DictConfig", OmegaConf.structured(DrafterConfig(kind=NO_DRAFT)))
    draft: DictConfig = OmegaConf.structured(DrafterConfig(kind=MODEL_DRAFT, model=catalogue.load(name)))
    for key in explicit:
        if key.startswith("draft.model."):
            OmegaConf.update(draft, key.removeprefix("draft."), OmegaConf.select(config, key))
    return draft
