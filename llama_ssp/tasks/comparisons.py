"""Prints and draws the ways to use a machine, and comparisons of machines. Never imports torch.

`planning.search` computes them; `reports.plan_tables` and `plan_figures` show them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.plan import PlanConfig, PlanFormat
from llama_ssp.errors import CapacityError
from llama_ssp.planning.layouts import notes_on_guesses
from llama_ssp.planning.plan import PLAN_VERSION, basis
from llama_ssp.planning.search import compare, comparison_document, nothing_left, search, search_document
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.tasks.dry_run import check_figure


def show_search(job: PlanSpec, machine: HardwareConfig, form: PlanFormat, *, figure: str | None = None) -> None:
    """Print every sensible use of a machine, the asked model first, and draw it; raises ConfigError as `show_plan`."""
    check_figure(figure)
    choices = search_document(search(job, machine))
    notes = notes_on_guesses(choice["adapts"] and choice["reason"] is None for choice in choices)
    if form is PlanFormat.json:
        content = {"plan_version": PLAN_VERSION, "basis": basis(machine), "notes": notes, "search": choices}
        print(json.dumps(content, indent=2))  # noqa: T201 - the requested output
    else:
        from llama_ssp.reports.plan_tables import print_search  # noqa: PLC0415 - JSON needs no rich

        print_search(choices, machine=machine.name, unit=machine.unit, basis=basis(machine), notes=notes)
    if figure:
        from llama_ssp.reports.plan_figures import draw_search  # noqa: PLC0415 - only figures need matplotlib

        draw_search(choices, Path(figure), machine=machine.name, unit=machine.unit)


def show_comparison(config: PlanConfig, machines: Sequence[HardwareConfig]) -> None:
    """Print what a job needs on each machine, the best first, and draw it.

    Raises ConfigError as `show_plan`, and CapacityError at the end if nothing is left.
    """
    check_figure(config.figure)
    choices = compare(config, machines)
    left = {choice.machine for choice in choices if choice.reason is None}
    used = [machine for machine in machines if machine.name in left] or machines
    content = comparison_document(choices, config, machines) | {"basis": sorted(set(map(basis, used)))}
    if config.format is PlanFormat.json:
        print(json.dumps({"plan_version": PLAN_VERSION} | content, indent=2))  # noqa: T201 - the requested output
    else:
        from llama_ssp.reports.plan_tables import print_machines  # noqa: PLC0415 - JSON needs no rich

        print_machines(content)
    if config.figure:
        from llama_ssp.reports.plan_figures import draw_machines  # noqa: PLC0415 - as above

        draw_machines(content, Path(config.figure))
    if problem := nothing_left(choices):
        raise CapacityError(problem)
