"""Plans a run on a described machine: memory per GPU, time per token, the best K. Needs no torch.

    llama-ssp plan model=30B draft=7B placement=sharded hardware=p4d_24xlarge
    llama-ssp plan model=65B hardware=8xa100_80gb format=json
{examples}    llama-ssp plan model=./DIR draft=none hardware=laptop_cpu
    llama-ssp plan model=OWNER/NAME draft=none hardware=h200
    llama-ssp plan model=llama3_70B workload=chat batch_size=8 hardware=8xh100,8xh200

Takes the settings of a run, which `llama-ssp run --help all` lists, and those below. hardware.KEY=VALUE changes a
figure of the machine, for example hardware.num_gpus=4, hardware.num_nodes=2, or hardware.usd_per_hour=20 for the price
of a million tokens. Several machines are one table of plans, in the order given. workload=chat, code, summarize or
batch sets prompt_tokens and max_new_tokens. Exit code: 0 fits, 3 does not fit (the message names changes that would
fit, the smallest first), 2 a setting is wrong, or runs refuse the model.
"""

import argparse
from collections.abc import Sequence
from typing import cast

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError, SspError, refuse
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import fullest_rank
from llama_ssp.planning.notes import refusals
from llama_ssp.planning.printed import accepting
from llama_ssp.planning.spec import spec_of_plan
from llama_ssp.registry import imported, load_plugins
from llama_ssp.run.commands import help as help_page
from llama_ssp.run.commands.options import Options, act_on
from llama_ssp.run.tasks.dry_run import figures_of, plan_on, resolve, show_machines, show_plan
from llama_ssp.settings.compose import Known, compose, to_run_config
from llama_ssp.settings.extensions import MORE, chooser_of
from llama_ssp.settings.schema import PlanConfig


def read_settings(settings: Sequence[str], known: Known | None = None) -> list[PlanConfig]:
    """Compose conf/plan.yaml with the settings, once for each machine; raises ConfigError for an invalid one."""
    return cast("list[PlanConfig]", [*map(to_run_config, compose(settings, root="plan", known=known))])


def main(arguments: list[str]) -> int:
    """Print the plan; returns the exit code."""
    own = help_page.entries(help_page.settings_of_plan()) if {"-h", "--help"} & {*arguments} else ""
    examples = "".join(f"    {more.example}\n" for more in MORE.all().values() if more.example)
    parser = Options("llama-ssp plan [SETTING=VALUE ...]", f"{(__doc__ or '').replace('{examples}', examples)}\n{own}")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own models, machines and pairs")
    parser.add_argument("settings", metavar="SETTING=VALUE", nargs="*", help="for example model=7B")
    return act_on(parser, arguments, _show)


def _show(given: argparse.Namespace) -> None:
    load_plugins()
    catalogue.use(given.config_dir)
    known: Known = {}
    configs = read_settings(given.settings, known)

    def accepts(settings: Sequence[str], is_whole: bool) -> bool:
        try:
            for one in map(resolve, read_settings([*([] if is_whole else given.settings), *settings], known)):
                machine = hardware.build(one.hardware)
                spec = spec_of_plan(one, machine)
                fullest_rank(spec, machine)
                refuse([*refusals(spec)])
        except SspError:
            return False
        return True

    with accepting(accepts):
        _show_plans(configs, given.settings)


def _show_plans(configs: Sequence[PlanConfig], settings: Sequence[str]) -> None:
    config, *others = configs
    chooser = chooser_of(config)
    if others:
        if asked := f"{chooser.name}=true" if chooser else "".join(figures_of(config)):
            raise ConfigError(f"{asked} takes one machine, and hardware= names {len(configs)}: give one of them")
        show_machines(configs)
        return
    config = resolve(config)
    machine = hardware.build(config.hardware)
    if chooser:
        refuse([*refusals(spec_of_plan(config, machine))])
        imported(chooser.choose, setting=f"{chooser.name}=true")(config, machine, settings)
    else:
        show_plan(plan_on(config, machine), config.format, figures=figures_of(config))
