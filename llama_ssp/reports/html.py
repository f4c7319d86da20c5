"""`report.html`: one self-contained page of finished runs; no script, no font, no other file.

`figures` and `tables` make figures and tables, `templates/report.html` is the page.
Import this module only to write a report: matplotlib and jinja2 take a second.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports import figures, plots, tables
from llama_ssp.reports.folder import Run, find_runs
from llama_ssp.reports.measures import LEAST_PROMPTS, RunMeasures, measure
from llama_ssp.reports.records import MEASURE_COLUMNS
from llama_ssp.reports.settings import labels, varying_settings
from llama_ssp.words import visible

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise ConfigError(f"a report needs jinja2: pip install jinja2 ({error})") from error

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(folders: Sequence[Path], output: Path | None, formats: Sequence[str] = ()) -> str:
    """Write the page and the tables into `output`, or into the only folder; returns a sentence that names them.

    `formats` are those in which the figures go into the folder `figures` too.

    Raises:
        ConfigError: a folder holds no run, several folders lack an `output`, or the output cannot be written.
    """
    if output is None and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders need --output=DIR, the folder of their common report")
    output = output or folders[0]
    runs, missing = find_runs(folders)
    if not runs:
        raise ConfigError("; ".join(missing))
    measures = [measure(run) for run in runs]
    texts = {
        "report.html": report(runs, measures, missing=missing), "runs.csv": tables.runs_to_csv(runs, measures),
        "report.csv": tables.to_csv(runs), "cells.csv": tables.cells_to_csv(runs),
    }  # fmt: skip
    written = [name for name, text in texts.items() if text]
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in written:
            # A model's text can end in half a surrogate pair.
            (output / name).write_text(texts[name], encoding="utf-8", errors="replace")
        if formats:
            (output / "figures").mkdir(exist_ok=True)
            found = _figures(runs, measures)
            for name, figure in found.items():
                for suffix in formats:
                    plots.save(figure, output / "figures" / f"{name}.{suffix}", for_paper=True)
            written.append(f"figures ({len(found)} as {', '.join(formats)})")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    shown = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    left_out = f"; left out: {'; '.join(missing)}" if missing else ""
    *first, last = written
    return f"wrote {output / first[0]}{''.join(f', {name}' for name in first[1:])} and {last}: {shown}{left_out}"


def report(runs: Sequence[Run], measures: Sequence[RunMeasures] | None = None, *, missing: Sequence[str] = ()) -> str:
    """Render the page of at least one run; `missing` holds sentences about runs that could not be read."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    templates.filters |= {"visible": visible, "number": tables.number}
    measures = measures or [measure(run) for run in runs]
    settings, sweep = varying_settings(runs), None
    if len(runs) > 1:
        sweep = {
            "settings": settings, "table": tables.runs_table(runs, measures, settings),
            "percentiles": tables.percentiles_table(measures, settings), "figures": _drawn(runs, measures),
        }  # fmt: skip
    return templates.get_template("report.html").render(
        title=_title(runs), runs=list(map(_section, runs, measures, _names(runs))), sweep=sweep,
        least_prompts=LEAST_PROMPTS, missing=missing,
    )  # fmt: skip


@plots.styled()
def _figures(runs: Sequence[Run], measures: Sequence[RunMeasures]) -> "dict[str, Figure]":
    """Draw the figures of all runs together, by names for files: of a sweep over its settings, of a run its own."""
    settings = varying_settings(runs)
    if len(runs) > 1:
        found: dict[str, Figure | None] = dict(figures.sweep_figures(runs, measures, settings))
    else:
        found = {
            "round": figures.round_timeline(runs[0]), "draft_lengths": figures.draft_lengths(runs[0]),
            "prompts": figures.prompts_of_run(measures[0]),
        }  # fmt: skip
    found["acceptance_by_position"] = figures.acceptance_by_position(runs, _names(runs))
    found["forecast"] = figures.forecast_against_measured(runs)
    found["memory"] = figures.memory_by_rank(runs)
    return {name: figure for name, figure in found.items() if figure}


def _drawn(runs: Sequence[Run], measures: Sequence[RunMeasures]) -> list[Markup]:
    """Draw the figures as SVG, whose texts matplotlib escapes."""
    return [Markup(plots.picture(figure)) for figure in _figures(runs, measures).values()]


def _names(runs: Sequence[Run]) -> list[str]:
    """Name each run by the settings that vary, else by its folder."""
    settings = varying_settings(runs)
    return labels(settings) if settings else [run.name for run in runs] if len(runs) > 1 else [_title(runs)]


def _title(runs: Sequence[Run]) -> str:
    pairs = list(dict.fromkeys(run.pair for run in runs))
    if len(runs) == 1:
        return f"{pairs[0]}, K = {runs[0].drafting}" if runs[0].drafting else pairs[0]
    return f"{len(runs)} runs of {pairs[0] if len(pairs) == 1 else f'{len(pairs)} pairs'}"


def _section(run: Run, measured: RunMeasures, name: str) -> dict[str, Any]:
    """Collect the parts of the page that are of one run."""
    evaluation = run.summary.evaluation
    return {
        "name": name, "run": run, "medians": tables.runs_table([run], [measured], []),
        "percentiles": tables.percentiles_table([measured], []), "measured": bool(measured.modes),
        "cells": tables.cells_table(run.summary.cells),
        "measures": tables.Table(MEASURE_COLUMNS, [each.cells for each in evaluation.measures] if evaluation else []),
        "figures": _drawn([run], [measured]),
    }  # fmt: skip
