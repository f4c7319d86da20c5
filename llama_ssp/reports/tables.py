"""Tables of finished runs: for the page of `html`, a terminal, papers, and `runs.csv`. Imports no matplotlib."""

import csv
import io
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from llama_ssp.reports.measures import PERCENTILES, Estimate
from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run, names_of, varying_settings
from llama_ssp.words import decimal

_OWN_COLUMNS = ("task", "model", "draft", "ranks", "seed")
"""Facts that every table has, whether they vary or not."""
_ONLY_IN_REPORTS = ("forecast speed-up", "prompts faster", "prompts", "tokens", "run", "status")


class Cell(NamedTuple):
    """A cell of a table: its text, and the interval under it."""

    text: str
    interval: str = ""


class Table(NamedTuple):
    """A table of the page; the first `num_left` columns hold names."""

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


def percentiles_table(runs: Sequence[Run]) -> Table:
    """Lay out a row for each mode of each run: percentiles over its completions."""
    heads, names = names_of(runs) if len(runs) > 1 else ([], [[]])
    rows = [
        [*own, name, str(mode.num_completions), *map(number, mode.ms_percentiles + mode.first_token_percentiles)]
        for run, own in zip(runs, names, strict=True)
        for name, mode in run.measures.modes.items()
    ]
    ends = [f"p{percentile}, {kind}" for kind in ("ms/token", "ms to first token") for percentile in PERCENTILES]
    return table([*heads, "mode", "completions", *ends], rows, len(heads) + 1)


def runs_to_csv(runs: Sequence[Run]) -> str:
    """Return one row for each run: its settings that vary, medians with intervals, percentiles and forecasts."""
    rows, settings = [], varying_settings(runs)
    for place, run in enumerate(runs):
        summary, fast, measured = run.summary, run.summary.speculative, run.measures
        num_pairs = len(measured.pairs) or None
        row: dict[str, object] = {"run": run.name, "task": summary.task, "model": summary.model, "draft": summary.draft}
        row |= {"num_draft_tokens": run.num_draft_tokens, "tree": summary.tree}
        row |= {"world_size": summary.world_size, "seed": summary.seed}
        row |= {setting.key: setting.values[place] for setting in settings if setting.key not in _OWN_COLUMNS}
        row |= {"status": run.status, "disturbed": summary.disturbed, "not_lossless": summary.caveat or None}
        row |= {"baseline": summary.baseline and summary.baseline.folder}
        row |= {"num_prompts": summary.num_prompts, "num_new_tokens": summary.num_new_tokens}
        for name in (PLAIN, SPECULATIVE):
            mode = measured.modes.get(name)
            row |= _columns(f"{name}_ms_per_token", measured.ms_per_token(name))
            row |= _spread(f"{name}_ms_per_token", mode.ms_percentiles if mode else None)
            row |= _spread(f"{name}_first_token_ms", mode.first_token_percentiles if mode else None)
        row |= _columns("speedup", measured.speedup)
        row |= {"num_paired": num_pairs, "num_faster": num_pairs and measured.num_faster}
        row |= _columns("acceptance", measured.acceptance)
        row |= {"tokens_per_round": fast and fast.tokens_per_round, "speedup_of_all_tokens": summary.speedup}
        rows.append(row | {f"forecast_{name}": value for name, value in vars(summary.forecast).items()})
    text = io.StringIO()
    writer = csv.DictWriter(text, [*dict.fromkeys(chain.from_iterable(rows))], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(name: str, found: Estimate | None) -> dict[str, object]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), found or [None] * 3, strict=True))


def _spread(name: str, values: Sequence[float | None] | None) -> dict[str, object]:
    return {f"{name}_p{p}": value for p, value in zip(PERCENTILES, values or [None] * len(PERCENTILES), strict=True)}


def number(value: float | None, unit: str = "", *, places: int = 2) -> str:
    """A figure of a table, empty if it was not measured."""
    return decimal(value, places, unit=unit, missing="")


def estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    """A figure with its interval."""
    if found is None:
        return Cell("")
    low, high = (decimal(end, places, missing="") for end in (found.low, found.high))
    return Cell(decimal(found.value, places, unit=unit), f"{low} to {high}" if low and high else "")
