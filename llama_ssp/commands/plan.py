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
from typing import cast

from llama_ssp.commands import machines, options
from llama_ssp.config import folders, plan
from llama_ssp.config.compose import compose, to_dataclasses
from llama_ssp.config.machines import hardware
from llama_ssp.config.registry import load_plugins
from llama_ssp.planning.spec import job_of_plan
from llama_ssp.tasks.dry_run import plan_on, resolve, show_comparison, show_plan, show_search


def read_settings(settings: list[str]) -> plan.PlanConfig:
    """Compose conf/plan.yaml with the settings; raises ConfigError for an invalid one."""
    (composed,) = compose(machines.for_one(settings, machines.compared(settings)), root="plan")
    return cast("plan.PlanConfig", to_dataclasses(composed.config, explicit=composed.explicit))


def main(arguments: list[str]) -> int:
    """Print the plan; returns the exit code."""
    parser = options.Options("llama-ssp plan [SETTING=VALUE ...]", __doc__)
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own models, machines and pairs")
    parser.add_argument("settings", metavar="SETTING=VALUE", nargs="*", help="of conf/plan.yaml, for example model=7B")
    return options.run(parser, arguments, _show)


def _show(given: argparse.Namespace) -> None:
    load_plugins()
    folders.use(given.config_dir)
    config = read_settings(given.settings)
    resolve(config)
    machine, names = hardware.build(config.hardware), machines.compared(given.settings)
    if names or config.compares:
        machines.check_placement(given.settings)
        show_comparison(config, machines.load(names, given.settings) if names else [machine])
    elif config.search:
        show_search(job_of_plan(config, machine), machine, config.format, figure=config.figure)
    else:
        show_plan(plan_on(config, machine), config.format, figure=config.figure)
