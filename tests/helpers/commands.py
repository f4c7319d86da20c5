"""Runs `launch/run.py` as a user does, alone or under torchrun."""

import subprocess
import sys
from collections.abc import Sequence
from typing import TypeAlias

from tests.helpers.repository import ROOT

Popen: TypeAlias = "subprocess.Popen[str]"

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def command(overrides: Sequence[str], *, num_ranks: int = 1) -> list[str]:
    """The command line of a run: plain python for one rank, torchrun for several."""
    if num_ranks == 1:
        return [sys.executable, "launch/run.py", *overrides]
    return [*TORCHRUN, str(num_ranks), "launch/run.py", *overrides]


def run(overrides: Sequence[str], *, num_ranks: int = 1, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run to the end; the exit code is not checked."""
    return subprocess.run(
        command(overrides, num_ranks=num_ranks),
        cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def start(overrides: Sequence[str], *, num_ranks: int = 1) -> Popen:
    """Start a run and return at once."""
    return subprocess.Popen(
        command(overrides, num_ranks=num_ranks),
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
