"""Reports of finished runs, or one report of a sweep: an offline HTML page with a figure and tables, and runs.csv.

    llama-ssp report outputs/RUN                      # writes report.html and its tables into the folder
    llama-ssp report outputs/SWEEP                    # one report of all runs below it
    llama-ssp report outputs/A outputs/B --output=DIR # one report of several folders
    llama-ssp report outputs/SWEEP figure=speed.pdf   # draws time, speed-up and acceptance over K, with intervals
    llama-ssp report outputs/SWEEP --table=latex      # prints tables for a paper, or --table=markdown; writes nothing

runs.csv has a row for each run, with the settings that differ; run.jsonl and benchmark.jsonl of a run have a line for
each completion and cell. Needs neither torch nor a GPU. Exit code: 0, or 2 if a folder holds no run that can be read.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama_ssp.errors import ConfigError
from llama_ssp.registry import load_plugins
from llama_ssp.reports.formats import FORMATS
from llama_ssp.run.commands.options import Options, act_on
from llama_ssp.terminal.unread import complain
from llama_ssp.text.messages import count, listed

if TYPE_CHECKING:  # slow to import
    from llama_ssp.reports.runs import Run

_FIGURE = "figure="


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    try:
        load_plugins()
    except ConfigError as error:
        complain(str(error))
        return error.exit_code
    forms = [form.name for form in FORMATS.all().values() if not form.file]
    parser = Options(f"llama-ssp report FOLDER... [figure=FILE | --output=DIR | --table={'|'.join(forms)}]", __doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="folder of a run, or of a sweep")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the report (default: the only FOLDER)")
    parser.add_argument("--table", choices=forms, help="print tables for a paper instead, with intervals and versions")
    return act_on(parser, arguments, _report)


def _report(given: argparse.Namespace) -> str:
    """Print a table, or write the page, `runs.csv` and other files; returns what is printed.

    Raises:
        ConfigError: a folder holds no run, several folders lack an `output`, or the output cannot be written.
    """
    from llama_ssp.reports.runs import find_runs

    named, folders = _figures(given)
    if given.table and given.output:
        raise ConfigError("--table prints: leave --output out, or send standard output to a file")
    if not (given.table or given.output or named) and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders need --output=DIR, the folder of their common report")
    runs, missing = find_runs(folders)
    if not runs:
        raise ConfigError("; ".join(missing))
    if named:
        return _drawn(runs, named, missing)
    if given.table:
        return FORMATS.of(given.table).text(runs, missing)
    output = given.output or folders[0]
    try:
        output.mkdir(parents=True, exist_ok=True)
        texts = {file: form.text(runs, missing) for form in FORMATS.all().values() if (file := form.file)}
        for name, content in texts.items():
            # A model's text can end in half a surrogate pair.
            (output / name).write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    return f"wrote {output / listed([*texts])}: {count(len(runs), 'run')}{_left_out(missing)}"


def _figures(given: argparse.Namespace) -> tuple[list[str], list[Path]]:
    """The files of figures among the arguments, and the folders; raises ConfigError for a figure with other files."""
    named = [file.removeprefix(_FIGURE) for file in map(str, given.folders) if file.startswith(_FIGURE)]
    folders = [folder for folder in given.folders if not str(folder).startswith(_FIGURE)]
    if not folders:
        raise ConfigError(f"{_FIGURE}{named[0]} needs the folder of runs: llama-ssp report FOLDER {_FIGURE}{named[0]}")
    if named and (given.table or given.output):
        raise ConfigError(f"{_FIGURE}{named[0]} is drawn alone: leave --table and --output out")
    return named, folders


def _drawn(runs: "Sequence[Run]", files: Sequence[str], missing: Sequence[str]) -> str:
    from llama_ssp.extensions.reports.figures import draw_over_k

    for file in files:
        draw_over_k(runs, Path(file))
    return f"wrote {listed(files)}: {count(len(runs), 'run')}{_left_out(missing)}"


def _left_out(missing: Sequence[str]) -> str:
    return f"; left out: {'; '.join(missing)}" if missing else ""
