"""`report.html`: one self-contained page of finished runs; no script, no font, no other file.

`figures` makes the charts, `plots` draws them, `templates/report.html` is the page.
Import this module only to write a report: matplotlib and jinja2 take a second.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError
from llama_ssp.reports import figures, plots
from llama_ssp.reports.charts import Chart
from llama_ssp.reports.evaluation import MEASURE_COLUMNS
from llama_ssp.reports.runs import Run

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise ConfigError(f"a report needs jinja2: pip install jinja2 ({error})") from error

RUN_COLUMNS = (
    "", "run", "models", "K", "ranks", "prompts", "tokens", "plain", "speculative", "speed-up", "forecast",
    "tokens/round", "accepted", "status",
)  # fmt: skip
CELL_COLUMNS = ("cell", "plain", "forecast", "generate", "speculative", "forecast", "assisted", "tokens/round")


def report(runs: Sequence[Run], *, missing: Sequence[str] = ()) -> str:
    """Render the page of at least one run; `missing` holds sentences about runs that could not be read."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return templates.get_template("report.html").render(
        title=_title(runs),
        runs=[_section(run) for run in runs],
        all_figures=_drawn(_figures(runs)) if len(runs) > 1 else [],
        run_columns=RUN_COLUMNS,
        run_rows=[[str(number), *_cells(run)] for number, run in enumerate(runs)],
        cell_columns=CELL_COLUMNS,
        measure_columns=MEASURE_COLUMNS,
        missing=missing,
    )


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        run = runs[0]
        drafting = f", K = {run.drafting}" if run.drafting else ""
        return f"{run.pair}{drafting}"
    pairs = list(dict.fromkeys(run.pair for run in runs))
    return f"{len(runs)} runs of {pairs[0]}" if len(pairs) == 1 else f"{len(runs)} runs of {len(pairs)} pairs"


def _section(run: Run) -> dict[str, Any]:
    summary = run.summary
    ranks = "1 rank" if summary.world_size == 1 else f"{summary.world_size} ranks"
    cells = f"{len(summary.cells)} cells, " if summary.cells else ""
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items() if version)
    return {
        "title": f"{run.name}: {_title([run])}",
        "job": f"task {summary.task}, {ranks}, {cells}{summary.num_prompts} prompts, "
        f"{summary.num_new_tokens} new tokens, seed {summary.seed}{f', {run.status}' if run.status else ''}",
        "made_by": versions + (f", commit {summary.git_commit[:12]}" if summary.git_commit else ""),
        "tiles": _tiles(run),
        "cells": [[cell.name, *map(_number, [*cell.columns, cell.tokens_per_round])] for cell in summary.cells],
        "evaluation": summary.evaluation,
        "figures": _drawn([figures.round_timeline(run), figures.draft_lengths(run), *_figures([run])]),
    }


def _figures(runs: Sequence[Run]) -> list[Chart | None]:
    accuracy = figures.forecast_against_measured(runs), figures.memory_by_rank(runs)
    return [figures.speedup_by_k(runs), figures.acceptance_by_position(runs), *accuracy]


def _drawn(charts: Iterable[Chart | None]) -> list[dict[str, str]]:
    """The pictures of the charts that exist; `plots` has escaped their texts."""
    return [{"title": chart.title, "svg": Markup(plots.picture(chart))} for chart in charts if chart]


def _tiles(run: Run) -> list[tuple[str, str]]:
    summary, fast = run.summary, run.summary.speculative
    return [
        (_number(summary.speedup, "x"), "speed-up"),
        (_number(summary.plain.ms_per_token if summary.plain else None), "ms/token, plain"),
        (_number(fast.ms_per_token if fast else None), "ms/token, speculative"),
        (_number(fast.tokens_per_round if fast else None), "tokens per round"),
        (_percent(fast.acceptance_rate if fast else None), "of examined tokens accepted"),
    ]


def _cells(run: Run) -> list[str]:
    summary, fast = run.summary, run.summary.speculative
    return [
        run.name, run.pair, run.drafting,
        str(summary.world_size), str(summary.num_prompts), str(summary.num_new_tokens),
        _number(summary.plain.ms_per_token if summary.plain else None), _number(fast.ms_per_token if fast else None),
        _number(summary.speedup, "x"), _number(summary.forecast.speedup, "x"),
        _number(fast.tokens_per_round if fast else None), _percent(fast.acceptance_rate if fast else None), run.status,
    ]  # fmt: skip


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.2f}{unit}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
