"""Prints the table of all jobs of a sweep with rich."""

from collections.abc import Sequence

from rich.table import Table

from llama_ssp.planning.plan import Plan
from llama_ssp.reports.plan_tables import StandardOutput, literal

LEAST_SHOWN_HOURS = 0.005


def print_jobs(jobs: Sequence[tuple[str, Plan, float | None]]) -> None:
    """Print one table of all jobs of a sweep: name, plan, and hours of decoding where they are known."""
    spent = [
        (hours, hours * plan.hardware.num_ranks if hours is not None and plan.hardware.device == "cuda" else None)
        for _, plan, hours in jobs
    ]
    sums = (_shown_hours(None if None in column else sum(filter(None, column))) for column in zip(*spent, strict=True))
    table = Table(show_footer=True)
    table.add_column("job", footer=f"{len(jobs)} jobs", overflow="fold")
    table.add_column("fits", footer=f"{sum(plan.fits for _, plan, _ in jobs)} of {len(jobs)}", no_wrap=True)
    for name, footer in zip(("ms/token", "hours", "GPU-hours"), ("", *sums), strict=True):
        table.add_column(name, justify="right", footer=footer, no_wrap=True)
    for (name, plan, _), hours in zip(jobs, spent, strict=True):
        fits = "[green]yes[/green]" if plan.fits else "[red]no[/red]"
        table.add_row(literal(name), fits, f"{1e3 * plan.timing.best_s:.2f}", *map(_shown_hours, hours))
    console = StandardOutput()
    console.print("All jobs; ms/token of a completion in its faster mode; hours of decoding at most, without loading")
    console.print(table)


def _shown_hours(hours: float | None) -> str:
    if hours is None:
        return "-"
    return "<0.01" if 0 < hours < LEAST_SHOWN_HOURS else f"{hours:.2f}"
