"""Reports of finished runs, or one report of a sweep: an offline HTML page of figures, and all rows as a table.

    llama-ssp report outputs/RUN                      # writes report.html and report.csv into the folder
    llama-ssp report outputs/SWEEP                    # one report of all runs below it
    llama-ssp report outputs/A outputs/B --output=DIR # one report of several folders

Benchmark cells go into cells.csv in the same folder. Needs neither torch nor a GPU. Exit code: 0, or 2 if a folder
holds no run that can be read.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from llama_ssp.commands import options
from llama_ssp.errors import ConfigError
from llama_ssp.reports.runs import cells_to_csv, find_runs, to_csv


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    parser = options.Options("llama-ssp report FOLDER... [--output=DIR]", __doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="folder of a run, or of a sweep")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the report (default: the only FOLDER)")
    return options.run(parser, arguments, _report)


def _report(given: argparse.Namespace) -> str:
    return write_report(given.folders, given.output)


def write_report(folders: Sequence[Path], output: Path | None) -> str:
    """Write the page and the tables into `output`, or into the only folder; returns a sentence that names them.

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
    from llama_ssp.reports.html import report  # noqa: PLC0415 - slow to import; --help and errors do not need it

    try:
        output.mkdir(parents=True, exist_ok=True)
        _write(output / "report.html", report(runs, missing=missing))
        _write(output / "report.csv", to_csv(runs))
        cells = cells_to_csv(runs)
        if cells:
            _write(output / "cells.csv", cells)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    shown = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    left_out = f"; left out: {'; '.join(missing)}" if missing else ""
    tables = "report.csv and cells.csv" if cells else "report.csv"
    return f"wrote {output / 'report.html'} and {tables}: {shown}{left_out}"


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", errors="replace")  # a model's text can end in half a surrogate pair
