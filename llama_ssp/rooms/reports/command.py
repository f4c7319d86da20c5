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
from llama_ssp.registry import load_plugins
from llama_ssp.reports.formats import FORMATS
from llama_ssp.run.commands.options import Options, act_on
from llama_ssp.terminal.unread import complain
from llama_ssp.words import count, listed


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    try:
        load_plugins()
    except ConfigError as error:
        complain(str(error))
        return error.exit_code
    forms = [form.name for form in FORMATS.all().values() if not form.file]
    parser = Options(f"llama-ssp report FOLDER... [--output=DIR | --table={'|'.join(forms)}]", __doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="folder of a run, or of a sweep")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the report (default: the only FOLDER)")
    parser.add_argument("--table", choices=forms, help="print tables for a paper instead, with intervals and versions")
    return act_on(parser, arguments, _report)


def _report(given: argparse.Namespace) -> str:
    """Print a table, or write the page, `runs.csv` and other files; returns what is printed.

    Raises:
        ConfigError: a folder holds no run, several folders lack an `output`, or the output cannot be written.
    """
    from llama_ssp.reports.runs import find_runs  # noqa: PLC0415 - slow to import; --help does not need it

    if given.table and given.output:
        raise ConfigError("--table prints: leave --output out, or send standard output to a file")
    if not (given.table or given.output) and len(given.folders) > 1:
        raise ConfigError(f"{len(given.folders)} folders need --output=DIR, the folder of their common report")
    runs, missing = find_runs(given.folders)
    if not runs:
        raise ConfigError("; ".join(missing))

    if given.table:
        return FORMATS.of(given.table).text(runs, missing)
    output = given.output or given.folders[0]
    try:
        output.mkdir(parents=True, exist_ok=True)
        texts = {file: form.text(runs, missing) for form in FORMATS.all().values() if (file := form.file)}
        for name, content in texts.items():
            # A model's text can end in half a surrogate pair.
            (output / name).write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    left_out = f"; left out: {'; '.join(missing)}" if missing else ""
    return f"wrote {output / listed([*texts])}: {count(len(runs), 'run')}{left_out}"
