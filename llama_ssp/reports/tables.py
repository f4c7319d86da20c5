"""Tables of finished runs, for a terminal and for reports. Imports no matplotlib."""

from collections.abc import Sequence
from typing import NamedTuple

from llama_ssp.reports.measures import Estimate
from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run, names_of
from llama_ssp.words import decimal

_ONLY_IN_REPORTS = ("forecast speed-up", "prompts faster", "prompts", "tokens", "run", "status")


class Cell(NamedTuple):
    """A cell of a table: its text, and the interval under it."""

    text: str
    interval: str = ""


class Table(NamedTuple):
    """A table; the first `num_left` columns hold names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    num_left: int = 1


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], num_left: int = 1) -> Table:
    """Make a table of the columns that have a text in any row."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    kept = [place for place in range(len(columns)) if any(row[place].text for row in cells)]
    left = sum(place < num_left for place in kept)
    return Table([columns[place] for place in kept], [[row[place] for place in kept] for row in cells], left)


def runs_table(runs: Sequence[Run], *, brief: bool = False) -> Table:
    """Lay out a row for each run: the settings that vary, and medians with their intervals; `brief` ones alone."""
    heads, names = names_of(runs)
    columns = [
        "plain, ms/token", "speculative, ms/token", "speed-up", "forecast speed-up", "prompts faster", "accepted",
        "tokens/round", "prompts", "tokens", "run", "status",
    ]  # fmt: skip
    kept = [place for place, name in enumerate(columns) if not (brief and name in _ONLY_IN_REPORTS)]
    rows: list[list[Cell | str]] = []
    for run, own in zip(runs, names, strict=True):
        summary, fast, measured, num_pairs = run.summary, run.summary.speculative, run.measures, len(run.measures.pairs)
        figures: list[Cell | str] = [
            *(estimated(measured.ms_per_token(mode)) for mode in (PLAIN, SPECULATIVE)),
            estimated(measured.speedup, unit="x"), number(summary.forecast.speedup if fast else None, "x"),
            f"{measured.num_faster} of {num_pairs}" if num_pairs else "", estimated(measured.acceptance, places=3),
            number(fast.tokens_per_round if fast else None), str(summary.num_prompts), str(summary.num_new_tokens),
            run.name, run.status,
        ]  # fmt: skip
        rows.append([*own, *(figures[place] for place in kept)])
    return table([*heads, *(columns[place] for place in kept)], rows, len(heads))


def number(value: float | None, unit: str = "", *, places: int = 2) -> str:
    """A figure of a table, empty if it was not measured."""
    return decimal(value, places, unit=unit, missing="")


def estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    """A figure with its interval."""
    if found is None:
        return Cell("")
    low, high = (decimal(end, places, missing="") for end in (found.low, found.high))
    return Cell(decimal(found.value, places, unit=unit), f"{low} to {high}" if low and high else "")
