"""`report.html`: one self-contained page of finished runs; no script, no font, no other file.

`figures` draws its figures, `templates/report.html` is the page; `runs.csv` has the same figures for other programs.
"""

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.reports import figures
from llama_ssp.extensions.reports.figures import Bar, bars_of, time_per_token
from llama_ssp.extensions.reports.tables import percentiles_table
from llama_ssp.reports.measures import LEAST_PROMPTS
from llama_ssp.reports.records import DISTURBED, MEASURE_COLUMNS, NOT_LOSSLESS, ResultTable
from llama_ssp.reports.runs import Run, names_of, varying_settings
from llama_ssp.reports.tables import kinds_table, remarks, repetitions_table, runs_table, table
from llama_ssp.text.messages import count, decimal, share, visible

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
    from markupsafe import Markup
except ImportError as error:
    raise ConfigError(f"a report needs jinja2: pip install jinja2 ({error})") from error


def report(runs: Sequence[Run], missing: Sequence[str] = ()) -> str:
    """Render the page of at least one run; `missing` holds sentences about runs that could not be read."""
    sweep, ((_, *heads), names) = None, names_of(runs)
    labels = [", ".join(map("{}={}".format, heads, own[1:])) or run.name for run, own in zip(runs, names, strict=True)]
    if len(runs) > 1:
        numbered = [f"{number}: {label}" for (number, *_), label in zip(names, labels, strict=True)]
        sweep = {
            "settings": varying_settings(runs),
            "table": runs_table(runs),
            "percentiles": percentiles_table(runs),
            "kinds": kinds_table(runs),
            "remarks": remarks(runs),
            "repetitions": repetitions_table(runs),
            "status": runs[0].status if len({run.status for run in runs}) == 1 else "",
            "figure": _drawn([row for found in map(bars_of, runs, numbered) for row in found]),
        }
    return _page().render(
        title=_title(runs),
        runs=list(map(_section, runs, labels)),
        sweep=sweep,
        least_prompts=LEAST_PROMPTS,
        missing=missing,
        mark=DISTURBED,
        not_lossless=NOT_LOSSLESS,
    )


@cache
def _page() -> Template:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update({"visible": visible, "number": decimal, "share": share, "counted": count})
    return templates.get_template("report.html")


@figures.styled()
def _drawn(rows: Sequence[Bar]) -> Markup | None:
    """Draw the figure as SVG, whose texts matplotlib escapes."""
    found = time_per_token(rows)
    return Markup(figures.picture(found)) if found else None


def _title(runs: Sequence[Run]) -> str:
    pairs = list(dict.fromkeys(run.pair for run in runs))
    if len(runs) == 1:
        return ", ".join(filter(None, [pairs[0], runs[0].summary.drafting]))
    return f"{len(runs)} runs of {pairs[0] if len(pairs) == 1 else f'{len(pairs)} pairs'}"


def _section(run: Run, name: str) -> dict[str, Any]:
    verdict, cells = run.summary.evaluation, run.summary.cells
    words = {DISTURBED: "disturbed", NOT_LOSSLESS: "not lossless"}
    mark = ", ".join(f"{mark} {words[mark]}" for mark in run.summary.marks.split())
    shown = type(cells[0]).on_page(cells) if cells else ResultTable((), (), ())
    return {
        "name": name,
        "run": run,
        "medians": runs_table([run]),
        "percentiles": percentiles_table([run]),
        "kinds": kinds_table([run]),
        "measured": bool(run.measures.modes),
        "results": table(shown.columns, shown.rows),
        "meaning": Markup(escape(" ".join(shown.sentences), quote=False)),
        "figure": _drawn(bars_of(run, mark)),
        "measures": table(MEASURE_COLUMNS, [one.cells for one in verdict.measures] if verdict else []),
    }
