"""Goals that measurements are held against, rows that are kept with what made them, and tables for pages.

How candidates take turns is the business of `llama_ssp.run.calibration.interleave`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llama_ssp.reports.provenance import git_commit, processor, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A measured figure and what it should be at most."""

    name: str
    measured: float
    at_most: float


def print_goals(console: Console, goals: Sequence[Goal]) -> None:
    """Show each goal beside its measurement."""
    table = Table(title="goals", title_justify="left", show_edge=False)
    for column in ("figure", "measured", "at most", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for goal in goals:
        verdict = "[green]holds[/]" if goal.measured <= goal.at_most else "[red]missed[/]"
        table.add_row(goal.name, f"{goal.measured:.3f}", f"{goal.at_most:g}", verdict)
    console.print(table)


def store(name: str, row: Mapping[str, object]) -> Path:
    """Append a result to `results/NAME.jsonl`, with the versions, the commit and the processor that made it."""
    made_by = {
        "versions": versions(),
        "git_commit": git_commit(),
        "processor": processor(),
        "time": time.strftime("%F"),
    }
    file = RESULTS / f"{name}.jsonl"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(made_by | dict(row)) + "\n")
    return file


def stored(name: str) -> list[Row]:
    """The rows of a program, the newest last."""
    file = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of a page."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])
