"""Writes the report of a run or a sweep: page, tables, and figures in the formats that papers take."""

from collections.abc import Sequence
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.reports.runs import cells_to_csv, find_runs, to_csv

FIGURE_FORMATS = ("svg", "pdf", "png")


def write_report(folders: Sequence[Path], output: Path | None, figures: Sequence[str] = ()) -> str:
    """Write the page and the tables into `output`, or into the only folder; returns a sentence that names them.

    `figures` are formats in which the figures go into the folder `figures` too.

    Raises:
        ConfigError: a folder holds no run, several folders lack an `output`, the output cannot be written, or a package
            that draws is missing.
    """
    if output is None and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders need --output=DIR, the folder of their common report")
    output = output or folders[0]
    runs, missing = find_runs(folders)
    if not runs:
        raise ConfigError("; ".join(missing))
    from llama_ssp.reports import html, plots  # noqa: PLC0415 - slow to import; --help and errors do not need it
    from llama_ssp.reports.sweeps.measures import measure  # noqa: PLC0415 - as above
    from llama_ssp.reports.sweeps.tables import runs_to_csv  # noqa: PLC0415 - as above

    measures = [measure(run) for run in runs]
    texts = {
        "report.html": html.report(runs, measures, missing=missing), "runs.csv": runs_to_csv(runs, measures),
        "report.csv": to_csv(runs), "cells.csv": cells_to_csv(runs),
    }  # fmt: skip
    written = [name for name, text in texts.items() if text]
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name in written:
            # A model's text can end in half a surrogate pair.
            (output / name).write_text(texts[name], encoding="utf-8", errors="replace")
        if figures:
            (output / "figures").mkdir(exist_ok=True)
            charts = html.charts(runs, measures)
            for name, chart in charts.items():
                for suffix in figures:
                    plots.save_figure(chart, output / "figures" / f"{name}.{suffix}")
            written.append(f"figures ({len(charts)} as {', '.join(figures)})")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    shown = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    left_out = f"; left out: {'; '.join(missing)}" if missing else ""
    *first, last = written
    return f"wrote {output / first[0]}{''.join(f', {name}' for name in first[1:])} and {last}: {shown}{left_out}"
