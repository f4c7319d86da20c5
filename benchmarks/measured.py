"""Common parts of the programs: goals, rows that are kept with what made them, tables and pages.

How candidates take turns is the business of `llama_ssp.run.calibration`.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_ssp.reports.provenance import git_commit, processor, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks"
TEMPLATES = ROOT / "benchmarks" / "templates"
Row = dict[str, Any]


class Goal(NamedTuple):
    """A measured figure and what it should be at most."""

    name: str
    measured: float
    at_most: float


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [heads, ["---"] * len(heads), *lines])


def table_of_goals(goals: Iterable[Goal]) -> str:
    """Each goal with its measurement."""
    lines = [
        (name, f"{measured:.2f}", f"{at_most:g}", "holds" if measured <= at_most else "**missed**")
        for name, measured, at_most in goals
    ]
    return markdown(["figure", "measured", "at most", ""], lines)


def store(name: str, row: Mapping[str, object]) -> None:
    """Append a result to `results/NAME.jsonl`, with the versions, the commit and the processor that made it."""
    made_by = {"versions": versions(), "git_commit": git_commit(), "processor": processor()}
    made_by["time"] = time.strftime("%F")
    file = RESULTS / f"{name}.jsonl"
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(made_by | dict(row)) + "\n")
    print(f"stored in {file}")


def stored(name: str) -> list[Row]:
    """The rows of a program, the newest last."""
    file = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def page_of(name: str, **parts: object) -> str:
    """A page from its template, with the processor, the versions and further parts."""
    template = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
    return template.format(processor=processor(), **versions(), **parts)


def show(text: str, *, page: str, is_written: bool) -> None:
    """Print a page, or write it into docs/benchmarks."""
    if is_written:
        (PAGES / page).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
