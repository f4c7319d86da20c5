"""Reports of finished runs, and of sweeps as one: a page of figures that opens offline, and all rows as a table.

    python launch/report.py outputs/RUN                      # writes report.html and report.csv into the folder
    python launch/report.py outputs/SWEEP                    # one report of all runs below it
    python launch/report.py outputs/A outputs/B --output=DIR # one report of several folders

Needs neither torch nor a GPU nor matplotlib. Exit code: 0, or 2 where a folder holds no run that can be read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.reports import html
from llama_ssp.reports.runs import find_runs, to_csv

OUTPUT = "--output="


def main(arguments: list[str]) -> int:
    """Write the report; returns the exit code."""
    if any(argument in {"-h", "--help"} for argument in arguments):
        print(__doc__)
        return 0
    try:
        print(write_report(arguments))
    except SspError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def write_report(arguments: list[str]) -> str:
    """Write both files; returns a sentence about them.

    Raises:
        ConfigError: an argument is wrong, a folder holds no run, or the files cannot be written.
    """
    folders = [Path(argument) for argument in arguments if not argument.startswith("--")]
    options = [argument for argument in arguments if argument.startswith("--")]
    outputs = [Path(option.removeprefix(OUTPUT)) for option in options if option.startswith(OUTPUT)]
    if unknown := [option for option in options if not option.startswith(OUTPUT)]:
        raise ConfigError(f"unknown option {unknown[0]}: there is {OUTPUT}FOLDER")
    if not folders:
        raise ConfigError("name the folder of a run or of a sweep, for example outputs/RUN")
    if not outputs and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders need {OUTPUT}FOLDER, into which their one report is written")
    output = outputs[-1] if outputs else folders[0]
    runs, missing = find_runs(folders)
    if not runs:
        raise ConfigError("; ".join(missing))
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "report.html").write_text(html.report(runs, missing=missing), encoding="utf-8")
        (output / "report.csv").write_text(to_csv(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {(error.strerror or str(error)).lower()}") from error
    shown = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    left_out = f"; left out: {'; '.join(missing)}" if missing else ""
    return f"wrote {output / 'report.html'} and report.csv: {shown}{left_out}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
