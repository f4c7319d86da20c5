"""Connects the config to Hydra: registers schemas, drafts and resolvers, and turns a DictConfig into dataclasses.

The files in `conf` hold the values. This module adds what files cannot express: types, one `draft` option per model,
and names that depend on the process. Nothing below `commands` sees a DictConfig.
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

from llama_ssp.config import catalogue
from llama_ssp.config.drafters import ModelDraftConfig, drafter_of, drafters, problem_of
from llama_ssp.config.options import search_path
from llama_ssp.config.options.search_path import draft_option
from llama_ssp.config.plan import PlanConfig
from llama_ssp.config.schema import DEFAULT_DRAFT, MODEL_DRAFT, NO_DRAFT, DrafterConfig, RunConfig
from llama_ssp.config.slurm import SlurmConfig
from llama_ssp.config.tasks import task_of, task_specs
from llama_ssp.errors import ConfigError

_ESCAPES, _ESCAPED = re.compile(r"\\([nt\\])"), {"n": "\n", "t": "\t", "\\": "\\"}

BUNDLES = ("experiment", "debug")
"""Groups whose options set values in several other groups."""


def register() -> None:
    """Register with Hydra what the files in `conf` refer to. Call before composing; repeated calls are harmless."""
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    store.store(group="schema", name="slurm", node=SlurmConfig)
    for name, task in task_specs().items():
        store.store(group="schema", name=name, node=task.config)
    _register_drafts(catalogue.names())
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)


def register_plan(*, draft: str) -> None:
    """Register what conf/plan.yaml refers to with this draft, and no more: a plan takes less than a second."""
    ConfigStore.instance().store(group="schema", name="plan", node=PlanConfig)
    _register_drafts({draft} & {*catalogue.names()})


def _register_drafts(models: Iterable[str]) -> None:
    """Register every kind of draft, and these models as drafts."""
    store = ConfigStore.instance()
    for name, draft in drafters().items():
        store.store(group="schema", name=f"draft_{name}", node=draft.config)
    for name in models:
        store.store(group="draft", name=name, node=draft_option(name))
    search_path.register()


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


def to_run_config(config: DictConfig, *, explicit: frozenset[str]) -> RunConfig:
    """Turn a config composed from `conf/config.yaml` into dataclasses, resolve the draft, and let the task fill in.

    Of the dotted keys that the user gave, those below `draft` apply to the default draft too. The result's
    `draft.kind` is never `default`, and its `draft.model` is null for kinds without a model.

    Raises:
        ConfigError: the default draft is unknown, a group of settings is a plain value, or a value is missing.
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
