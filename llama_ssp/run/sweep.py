"""The end of a sweep on this machine: one table over its points. Slow to import."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from llama_ssp.reports.runs import find_runs
from llama_ssp.reports.tables import runs_table
from llama_ssp.settings.commands import COMMANDS
from llama_ssp.terminal.terminal import Terminal
from llama_ssp.text.messages import decimal


def show_table(folders: Sequence[Path]) -> None:
    """Print one table over the points that have a summary, and say how to make their report."""
    complete = [folder for folder in folders if (folder / "summary.json").is_file()]
    runs, _ = find_runs(complete) if complete else ([], [])
    if not any(run.measures.modes for run in runs):
        return
    terminal = Terminal.of_rank(0)
    terminal.sweep(runs_table(runs, brief=True))
    for run in runs:
        found, plain = run.summary.baseline, run.summary.plain
        if found and found.ms_per_token and plain and plain.ms_per_token:
            drift = found.ms_per_token / plain.ms_per_token - 1
            terminal.say(
                f"plain decoding was measured once, in {found.folder}, and again at the end: "
                f"{decimal(plain.ms_per_token)} and {decimal(found.ms_per_token)} ms/token ({100 * drift:+.0f} %)"
            )
    for command in COMMANDS.all().values():
        if command.of_sweeps:
            sweep = shlex.quote(str(folders[0].parent))
            terminal.say(f"llama-ssp {command.name} {sweep} {command.of_sweeps} of all points")
