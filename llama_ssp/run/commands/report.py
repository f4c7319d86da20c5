"""Reports of finished runs, or one report of a sweep: an offline HTML page with a figure and tables, and runs.csv.

    llama-ssp report outputs/RUN                      # writes report.html and its tables into the folder
    llama-ssp report outputs/SWEEP                    # one report of all runs below it
    llama-ssp report outputs/A outputs/B --output=DIR # one report of several folders
    llama-ssp report outputs/SWEEP --table=latex      # prints tables for a paper, or --table=markdown; writes nothing

runs.csv has a row for each run, with the settings that differ; run.jsonl and benchmark.jsonl of a run have a line for
each completion and cell. Needs neither torch nor a GPU. Exit code: 0, or 2 if a folder holds no run that can be read.
"""

import argparse
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.run.commands.options import Options, act_on


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    parser = Options("llama-ssp report FOLDER... [--output=DIR | --table=markdown|latex]", __doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="folder of a run, or of a sweep")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the report (default: the only FOLDER)")
    forms = ("markdown", "latex")
    parser.add_argument("--table", choices=forms, help="print tables for a paper instead, with intervals and versions")
    return act_on(parser, arguments, _report)


def _report(given: argparse.Namespace) -> str:
    if given.table:
        if given.output:
            raise ConfigError("--table prints: leave --output out, or send standard output to a file")
        from llama_ssp.reports.papers import paper_tables  # noqa: PLC0415 - as below

        return paper_tables(given.folders, given.table)
    from llama_ssp.reports.html import write_report  # noqa: PLC0415 - slow to import; --help does not need it

    return write_report(given.folders, given.output)
