"""Plans a job on a described machine: memory per GPU, time per token, the best K. Needs no torch.

    llama-ssp plan model=30B draft=7B placement=sharded hardware=p4d_24xlarge
    llama-ssp plan model=65B_8bit hardware=g5_12xlarge format=json
    llama-ssp plan model=30B hardware=8xa100_80gb search=true
    llama-ssp plan model=local model.path=DIR draft=none hardware=laptop_cpu
    llama-ssp plan model=OWNER/NAME draft=none hardware=1xh200
    llama-ssp plan model=llama3_70B hardware=all objective=price max_ms_per_token=30

Takes the settings of conf/plan.yaml as KEY=VALUE. hardware.KEY=VALUE changes a figure of the machine, for example
hardware.num_gpus=4 or hardware.num_nodes=2. Exit code: 0 fits, 3 does not fit (the message names changes that would
fit, the smallest first), 2 a setting is wrong.
"""

import argparse
import re
from collections.abc import Iterable
from typing import cast

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.commands import command_line, machines, options
from llama_ssp.commands.unknown_settings import unknown_setting
from llama_ssp.config import catalogue, folders, plan, store
from llama_ssp.config.drafters import ModelDraftConfig, drafter_of, drafters
from llama_ssp.config.machines import hardware
from llama_ssp.config.options import choices
from llama_ssp.config.registry import load_plugins
from llama_ssp.errors import ConfigError, one_message
from llama_ssp.planning.spec import make_job, settle_models
from llama_ssp.tasks.comparisons import show_comparison, show_search
from llama_ssp.tasks.dry_run import plan_job, show_plan, with_hub_sizes

_NAME = "plan"


def read_settings(settings: list[str]) -> plan.PlanConfig:
    """Compose conf/plan.yaml with the settings, and choose the draft; raises ConfigError for an invalid one."""
    for setting in settings:
        if setting.startswith(("=", "hydra")):
            raise ConfigError(f"{setting!r} is not a setting of a plan: conf/plan.yaml lists them all, as name=value")
    settings = machines.for_one(settings, machines.compared(settings))
    given = dict(setting.split("=", 1) for setting in settings if "=" in setting)
    _check_keys(given)
    known = {
        "model": catalogue.names(),
        "hardware": hardware.names(),
        "draft": [*catalogue.names(), *drafters(), "default"],
    }
    known["placement"] = folders.names("placement")
    for group, names in known.items():
        if problems := [*choices.problems_of(group, given[group], names)] if group in given else []:
            raise ConfigError(one_message(problems))
    if given.get("draft", "default") == "default":
        target = catalogue.load(given.get("model") or command_line.default_of("plan.yaml", "model"))
        others = [setting for setting in settings if not setting.startswith("draft=")]
        given["draft"] = target.default_draft or "none"
        settings = [*others, f"draft={given['draft']}"]
    # `++` lets unknown figures of the machine through: `hardware` reports them with all others that are wrong.
    added = ("hardware.", "prices=")
    settings = [f"++{setting}" if setting.startswith(added) else setting for setting in settings]
    store.register_plan(draft=given["draft"])
    try:
        with initialize_config_dir(config_dir=str(folders.conf_dir()), version_base="1.3"):
            config = cast("plan.PlanConfig", OmegaConf.to_object(_composed(settings)))
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # TypeError: a group is no name
        raise ConfigError(f"{command_line.one_sentence(error)} (conf/plan.yaml has every setting)") from error
    if not drafter_of(config.draft).has_model:
        config.draft.model = None
    return config


def _composed(settings: list[str]) -> DictConfig:
    """Compose conf/plan.yaml as Hydra does, but without the settings of Hydra itself, which take twice as long."""
    try:
        loader, overrides = GlobalHydra.instance().config_loader(), OverridesParser.create().parse_overrides(settings)
        if isinstance(loader, ConfigLoaderImpl) and not any(override.is_sweep_override() for override in overrides):
            repository = CachingConfigRepository(loader.repository)
            found = create_defaults_list(
                repo=repository, config_name=_NAME, overrides_list=overrides, prepend_hydra=False, skip_missing=False
            )
            composed = loader._compose_config_from_defaults_list(found.defaults, repository)
            OmegaConf.set_struct(composed, value=True)
            loader._apply_overrides_to_config(found.config_overrides, composed)
            return composed
    except Exception:  # noqa: BLE001 - Hydra says what is wrong, or has parts of other names and composes it
        pass
    return compose(config_name=_NAME, overrides=settings)


def _check_keys(given: Iterable[str]) -> None:
    """Refuse unknown settings; `hardware` and shapes are open, and Hydra knows the signs +, ~ and @."""
    keys = frozenset([*command_line.keys_of(plan.PlanConfig), *command_line.keys_of(ModelDraftConfig, "draft.")])
    left_to_others = re.compile(r"hardware\.|.*\.shape\.|.*[+~@]")
    unknown = [key for key in given if key not in keys and not left_to_others.match(key)]
    if unknown:
        otherwise = "conf/plan.yaml lists them all"
        raise ConfigError(one_message([unknown_setting(key, keys, otherwise=otherwise) for key in unknown]))


def main(arguments: list[str]) -> int:
    """Print the plan; returns the exit code."""
    parser = options.Options("llama-ssp plan [SETTING=VALUE ...]", __doc__)
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own models, machines and pairs")
    parser.add_argument("settings", metavar="SETTING=VALUE", nargs="*", help="of conf/plan.yaml, for example model=7B")
    return options.run(parser, [*map(command_line.take_literally, arguments)], _show)


def _show(given: argparse.Namespace) -> None:
    load_plugins()
    folders.use(given.config_dir)
    config = read_settings(given.settings)
    config.model = with_hub_sizes(config.model, any_family=True)
    config.draft.model = config.draft.model and with_hub_sizes(config.draft.model, any_family=True)
    settle_models(config)
    plan.check(config)
    machine, names = hardware.build(config.hardware), machines.compared(given.settings)
    if names or config.compares:
        machines.check_placement(given.settings)
        show_comparison(config, machines.load(names, given.settings) if names else [machine])
        return
    job = make_job(config, machine)
    if config.search:
        show_search(job, machine, config.format, figure=config.figure)
    else:
        auto_ranks = machine.num_ranks if config.placement.auto else None
        chosen = plan_job(job, machine, auto_ranks=auto_ranks, divides=True)
        show_plan(chosen, config.format, figure=config.figure)
