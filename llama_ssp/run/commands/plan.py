"""Plans a job on a described machine: memory per GPU, time per token, the best K. Needs no torch.

    llama-ssp plan model=30B draft=7B placement=sharded hardware=p4d_24xlarge
    llama-ssp plan model=65B_8bit hardware=g5_12xlarge format=json
    llama-ssp plan model=30B hardware=8xa100_80gb search=true
    llama-ssp plan model=./DIR draft=none hardware=laptop_cpu
    llama-ssp plan model=OWNER/NAME draft=none hardware=h200
    llama-ssp plan model=llama3_70B workload=chat batch_size=8 hardware=8xh100,8xh200

Takes the settings of a run, which `llama-ssp run --help all` lists, and those below. hardware.KEY=VALUE changes a
figure of the machine, for example hardware.num_gpus=4, hardware.num_nodes=2, or hardware.usd_per_hour=20 for the price
of a million tokens. Several machines are one table of plans, in the order given. workload=chat, code, summarize or
batch sets prompt_tokens and max_new_tokens. Exit code: 0 fits, 3 does not fit (the message names changes that would
fit, the smallest first), 2 a setting is wrong.
"""

import argparse
from collections.abc import Sequence
from typing import cast

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError, one_message
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.registry import load_plugins
from llama_ssp.run.commands import help as help_page
from llama_ssp.run.commands.options import Options, act_on
from llama_ssp.run.tasks.dry_run import plan_on, resolve, show_machines, show_plan, show_search
from llama_ssp.settings.compose import compose, parser, problems_of_option, to_run_config
from llama_ssp.settings.schema import PlanConfig

_KEY = "hardware"


def read_settings(settings: list[str]) -> PlanConfig:
    """Compose conf/plan.yaml with the settings; raises ConfigError for an invalid one."""
    if names := compared(settings):  # all are planned with the settings of the first
        settings = [*(each for each in settings if not each.startswith(f"{_KEY}=")), f"{_KEY}={names[0]}"]
    (composed,) = compose(settings, root="plan")
    return cast("PlanConfig", to_run_config(composed.config, explicit=composed.explicit))


def main(arguments: list[str]) -> int:
    """Print the plan; returns the exit code."""
    own = help_page.entries(help_page.settings_of_plan()) if {"-h", "--help"} & {*arguments} else ""
    parser = Options("llama-ssp plan [SETTING=VALUE ...]", f"{__doc__}\n{own}")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own models, machines and pairs")
    parser.add_argument("settings", metavar="SETTING=VALUE", nargs="*", help="for example model=7B")
    return act_on(parser, arguments, _show)


def _show(given: argparse.Namespace) -> None:
    load_plugins()
    catalogue.use(given.config_dir)
    config = read_settings(given.settings)
    if names := compared(given.settings):
        if config.search or config.figure:
            asked = "search=true" if config.search else f"figure={config.figure}"
            raise ConfigError(f"{asked} takes one machine, and hardware= names {len(names)}: give one of them")
        show_machines(config, machines_of(names, given.settings))
        return
    resolve(config)
    machine = hardware.build(config.hardware)
    if config.search:
        show_search(config, machine, given.settings)
    else:
        show_plan(plan_on(config, machine), config.format, figure=config.figure)


def compared(settings: Sequence[str]) -> list[str] | None:
    """Name the machines of a list; None if the settings name one. ConfigError for names that do not exist."""
    named = [setting.partition("=")[2] for setting in settings if setting.startswith(f"{_KEY}=")]
    chosen = named[-1].strip("[]'\" ") if named else ""
    names = [*dict.fromkeys(filter(None, map(str.strip, chosen.split(","))))]
    if "," not in chosen or not names:
        return None
    known = hardware.names()
    if problems := [problem for name in names for problem in problems_of_option(_KEY, name, known)]:
        raise ConfigError(one_message(problems))
    return names


def machines_of(names: Sequence[str], settings: Sequence[str]) -> list[HardwareConfig]:
    """Read the machines, with the figures that the settings change in all of them; ConfigError with all problems."""
    changes = [setting.lstrip("+") for setting in settings if setting.lstrip("+").startswith(f"{_KEY}.")]
    overrides = parser().parse_overrides(changes)
    machines, problems = [], []
    for name in names:
        figures, _ = catalogue.option(_KEY, name) or ({}, None)
        for override in overrides:
            *path, last = override.key_or_group.split(".")[1:]
            inner = figures
            for key in path:
                if not isinstance(inner.get(key), dict):
                    inner[key] = {}
                inner = inner[key]
            inner[last] = override.value()
        found = [f"{name}: {problem}" for problem in hardware.problems_of(figures)]
        problems += found
        machines += [] if found else [hardware.build(figures)]
    if problems:
        raise ConfigError(one_message(problems))
    return machines
