"""How things are timed: repeatedly, taken in turns, compared within one run, and kept with what made them.

On a shared machine a single time says little. All candidates run in every repetition, one after the other, and what is
reported is the median of the ratios within a repetition.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llama_ssp.reports.provenance import git_commit, versions

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A measured figure and what it should be at most."""

    name: str
    measured: float
    at_most: float

    @property
    def holds(self) -> bool:
        """Whether the goal is reached."""
        return self.measured <= self.at_most


def in_turns(
    candidates: Mapping[str, Callable[[int], float]], *, num_repetitions: int, num_warmup: int = 1
) -> dict[str, list[float]]:
    """Run all candidates in every repetition.

    Args:
        candidates: each is called with the number of the repetition, and returns what it measured.
        num_repetitions: counted repetitions.
        num_warmup: repetitions before them that are not counted.

    Returns:
        The measurements of each candidate, in order of the repetitions.
    """
    measured: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-num_warmup, num_repetitions):
        for name, measure in candidates.items():
            value = measure(repetition)
            if repetition >= 0:
                measured[name].append(value)
    return measured


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def print_goals(console: Console, goals: Sequence[Goal]) -> None:
    """Show each goal beside its measurement."""
    table = Table(title="goals", title_justify="left", show_edge=False)
    for column in ("figure", "measured", "at most", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for goal in goals:
        verdict = "[green]holds[/]" if goal.holds else "[red]missed[/]"
        table.add_row(goal.name, f"{goal.measured:.3f}", f"{goal.at_most:g}", verdict)
    console.print(table)


def store(name: str, row: Mapping[str, object]) -> Path:
    """Append a result to `results/NAME.jsonl`, with the versions, the commit and the processor that made it."""
    made_by = {
        "versions": versions(),
        "git_commit": git_commit(),
        "processor": _processor(),
        "time": time.strftime("%F"),
    }
    file = RESULTS / f"{name}.jsonl"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(made_by | dict(row)) + "\n")
    return file


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
