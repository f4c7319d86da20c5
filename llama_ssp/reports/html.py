"""`report.html`: one self-contained page of finished runs; no script, no font, no other file.

`figures` draws its figures, `templates/report.html` is the page; `runs.csv` has the same figures for other programs.
Import this module only to write a report: matplotlib and jinja2 take a second.
"""

import csv
import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llama_ssp.errors import ConfigError
from llama_ssp.reports import figures
from llama_ssp.reports.figures import Bar, bars_of, time_per_token
from llama_ssp.reports.measures import LEAST_PROMPTS, PERCENTILES, Estimate, RunMeasures, measure
from llama_ssp.reports.records import MEASURE_COLUMNS, PLAIN, SPECULATIVE
from llama_ssp.reports.runs import Run, Setting, find_runs, labels, varying_settings
from llama_ssp.words import count, decimal, share, visible

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise ConfigError(f"a report needs jinja2: pip install jinja2 ({error})") from error

_OWN_COLUMNS = ("task", "model", "draft", "ranks", "seed")
"""Facts that every table has, whether they vary or not."""
_CELL_COLUMNS = ("cell", "plain", "forecast", "generate", "speculative", "forecast", "assisted", "tokens/round")


def write_report(folders: Sequence[Path], output: Path | None) -> str:
    """Write the page and `runs.csv` into `output`, or into the only folder; returns a sentence that names them.

    Raises:
        ConfigError: a folder holds no run, several folders lack an `output`, or the output cannot be written.
    """
    if output is None and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders need --output=DIR, the folder of their common report")
    output = output or folders[0]
    runs, missing = find_runs(folders)
    if not runs:
        raise ConfigError("; ".join(missing))
    measures = [measure(run.lines) for run in runs]
    table = runs_to_csv(runs, measures, varying_settings(runs))
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in ("report.html", report(runs, measures, missing=missing)), ("runs.csv", table):
            # A model's text can end in half a surrogate pair.
            (output / name).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    left_out = f"; left out: {'; '.join(missing)}" if missing else ""
    return f"wrote {output / 'report.html'} and runs.csv: {count(len(runs), 'run')}{left_out}"


def report(runs: Sequence[Run], measures: Sequence[RunMeasures] | None = None, *, missing: Sequence[str] = ()) -> str:
    """Render the page of at least one run; `missing` holds sentences about runs that could not be read."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters |= {"visible": visible, "number": decimal, "share": share, "counted": count}
    measures = measures or [measure(run.lines) for run in runs]
    settings, sweep = varying_settings(runs), None
    names = labels(settings) if settings else [run.name for run in runs]
    if len(runs) > 1:
        numbered = [f"{place}: {name}" for place, name in enumerate(names)]
        rows = [row for found in map(bars_of, runs, measures, numbered) for row in found]
        sweep = {
            "settings": settings, "table": runs_table(runs, measures, settings),
            "percentiles": percentiles_table(measures, settings), "figure": _drawn(rows),
        }  # fmt: skip
    return templates.get_template("report.html").render(
        title=_title(runs), runs=list(map(_section, runs, measures, names)), sweep=sweep,
        least_prompts=LEAST_PROMPTS, missing=missing,
    )  # fmt: skip


@figures.styled()
def _drawn(rows: Sequence[Bar]) -> Markup | None:
    """Draw the figure as SVG, whose texts matplotlib escapes."""
    found = time_per_token(rows)
    return Markup(figures.picture(found)) if found else None


def _title(runs: Sequence[Run]) -> str:
    pairs = list(dict.fromkeys(run.pair for run in runs))
    if len(runs) == 1:
        return f"{pairs[0]}, K = {runs[0].drafting}" if runs[0].drafting else pairs[0]
    return f"{len(runs)} runs of {pairs[0] if len(pairs) == 1 else f'{len(pairs)} pairs'}"


def _section(run: Run, measured: RunMeasures, name: str) -> dict[str, Any]:
    """Collect the parts of the page that are of one run."""
    verdict, cells = run.summary.evaluation, run.summary.cells
    figures_of = [[cell.name, *map(_number, [*cell.columns, cell.tokens_per_round])] for cell in cells]
    return {
        "name": name, "run": run, "medians": runs_table([run], [measured], []),
        "percentiles": percentiles_table([measured], []), "measured": bool(measured.modes),
        "cells": _table(_CELL_COLUMNS, figures_of), "figure": _drawn(bars_of(run, measured, name)),
        "measures": _table(MEASURE_COLUMNS, [one.cells for one in verdict.measures] if verdict else []),
    }  # fmt: skip


class Cell(NamedTuple):
    """A cell of a table: its text, and the interval under it."""

    text: str
    interval: str = ""


class Table(NamedTuple):
    """A table of the page; the first `num_left` columns hold names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    num_left: int = 1


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], num_left: int = 1) -> Table:
    """Make a table of the columns that have a text in any row."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    kept = [place for place in range(len(columns)) if any(row[place].text for row in cells)]
    left = sum(place < num_left for place in kept)
    return Table([columns[place] for place in kept], [[row[place] for place in kept] for row in cells], left)


def runs_table(runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each run: the settings that vary, and medians with their intervals."""
    columns = [
        "#", *(setting.name for setting in settings), "plain, ms/token", "speculative, ms/token", "speed-up",
        "forecast speed-up", "prompts faster", "accepted", "tokens/round", "prompts", "tokens", "run", "status",
    ]  # fmt: skip
    rows: list[list[Cell | str]] = []
    for place, (run, measured) in enumerate(zip(runs, measures, strict=True)):
        summary, fast, num_pairs = run.summary, run.summary.speculative, len(measured.pairs)
        rows.append([
            str(place), *(setting.texts[place] for setting in settings),
            *(_estimated(measured.ms_per_token(mode)) for mode in (PLAIN, SPECULATIVE)),
            _estimated(measured.speedup, unit="x"), _number(summary.forecast.speedup if fast else None, "x"),
            f"{measured.num_faster} of {num_pairs}" if num_pairs else "", _estimated(measured.acceptance, places=3),
            _number(fast.tokens_per_round if fast else None), str(summary.num_prompts), str(summary.num_new_tokens),
            run.name, run.status,
        ])  # fmt: skip
    return _table(columns, rows, 1 + len(settings))


def percentiles_table(measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> Table:
    """Lay out a row for each mode of each run: percentiles over its completions."""
    heads, rows = ["#", *(setting.name for setting in settings)] if len(measures) > 1 else [], []
    for place, measured in enumerate(measures):
        names = [str(place), *(setting.texts[place] for setting in settings)] if heads else []
        for name, mode in measured.modes.items():
            figures = map(_number, mode.ms_percentiles + mode.first_token_percentiles)
            rows.append([*names, name, str(mode.num_completions), *figures])
    ends = [f"p{percentile}, {kind}" for kind in ("ms/token", "ms to first token") for percentile in PERCENTILES]
    return _table([*heads, "mode", "completions", *ends], rows, len(heads) + 1)


def runs_to_csv(runs: Sequence[Run], measures: Sequence[RunMeasures], settings: Sequence[Setting]) -> str:
    """Return one row for each run: its settings that vary, medians with intervals, percentiles and forecasts."""
    rows = []
    for place, (run, measured) in enumerate(zip(runs, measures, strict=True)):
        summary, fast, num_pairs = run.summary, run.summary.speculative, len(measured.pairs) or None
        row: dict[str, object] = {"run": run.name, "task": summary.task, "model": summary.model, "draft": summary.draft}
        row |= {"num_draft_tokens": run.num_draft_tokens, "world_size": summary.world_size, "seed": summary.seed}
        row |= {setting.key: setting.values[place] for setting in settings if setting.key not in _OWN_COLUMNS}
        row |= {"status": run.status, "num_prompts": summary.num_prompts, "num_new_tokens": summary.num_new_tokens}
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


def _number(value: float | None, unit: str = "") -> str:
    return decimal(value, unit=unit, missing="")


def _estimated(found: Estimate | None, *, unit: str = "", places: int = 2) -> Cell:
    if found is None:
        return Cell("")
    low, high = (decimal(end, places, missing="") for end in (found.low, found.high))
    return Cell(decimal(found.value, places, unit=unit), f"{low} to {high}" if low and high else "")
