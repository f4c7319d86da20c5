"""Reports of finished runs, or one report of a sweep: an offline HTML page of figures, and all rows as tables.

    llama-ssp report outputs/RUN                      # writes report.html and its tables into the folder
    llama-ssp report outputs/SWEEP                    # one report of all runs below it
    llama-ssp report outputs/A outputs/B --output=DIR # one report of several folders
    llama-ssp report outputs/SWEEP --figures=pdf,svg  # its figures as files too, in the folder figures

runs.csv has a row for each run, report.csv for each completion, cells.csv for each cell of a benchmark. Settings that
differ between the runs are columns and axes. Needs neither torch nor a GPU. Exit code: 0, or 2 if a folder holds no run
that can be read.
"""

import argparse
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.run.commands import program

FORMATS = ("svg", "pdf", "png")


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    parser = program.Options("llama-ssp report FOLDER... [--output=DIR] [--figures=FORMATS]", __doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="folder of a run, or of a sweep")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the report (default: the only FOLDER)")
    known = ", ".join(FORMATS)
    parser.add_argument("--figures", metavar="FORMATS", default="", help=f"save the figures as any of {known}")
    return program.act_on(parser, arguments, _report)


def _report(given: argparse.Namespace) -> str:
    formats = [name for name in given.figures.split(",") if name]
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ConfigError(f"--figures={','.join(unknown)}: figures are saved as any of {', '.join(FORMATS)}")
    from llama_ssp.reports.html import write_report  # noqa: PLC0415 - slow to import; --help does not need it

    return write_report(given.folders, given.output, formats)
