"""The ways to start a run: the program with one rank or two of its own, torchrun, and the file of the checkout."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.commands import command
from tests.helpers.repository import ROOT

PROGRAM = [sys.executable, "-m", "llama_ssp"]
STARTERS = ("ranks=1", "ranks=2", "torchrun", "launch/run.py")


def command_of(starter: str, words: Sequence[str]) -> list[str]:
    """The command line of a run that is started so."""
    if starter == "torchrun":
        return command(words, num_ranks=2)
    if starter == "launch/run.py":
        return command(words)
    return [*PROGRAM, "run", *words, starter]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with the repository's package importable from every folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **(more or {})}


def run_program(
    *words: str, cwd: Path = ROOT, stdin: str = "", more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `llama-ssp` to its end; the exit code is not checked."""
    return subprocess.run(
        [*PROGRAM, *words], cwd=cwd, env=environment(more), input=stdin,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
