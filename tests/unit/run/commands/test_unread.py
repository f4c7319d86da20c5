"""Programs whose output nobody reads any more, as behind `| head`, end without a complaint, and with their own code."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import command
from tests.helpers.disturbed import wait_for
from tests.helpers.lanes import heavy
from tests.helpers.repository import ROOT
from tests.helpers.terminals import OnTerminal


def ended_unread(program: str, *arguments: str, stderr: int) -> tuple[int, bytes | None]:
    """Exit code and standard error (None where it has gone the same way) of a program of which nobody reads a word."""
    command = [sys.executable, f"launch/{program}", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as running:
        assert running.stdout
        running.stdout.close()
        complaint = running.stderr.read() if running.stderr else None
    return running.returncode, complaint


@pytest.mark.parametrize("program", ["run.py", heavy("plan.py")])
def test_a_failure_keeps_its_code_where_nobody_reads_the_sentence(program: str) -> None:
    assert ended_unread(program, "model=nosuch", stderr=subprocess.STDOUT) == (2, None)


@pytest.mark.parametrize(
    "command",
    [
        ("run.py", "--cfg", "job"), heavy(("run.py", "model=7B", "dry_run=true")), ("plan.py", "model=7B"),
        heavy(("plan.py", "model=7B", "format=json")), heavy(("report.py", "--help")),
    ],
)  # fmt: skip
def test_what_only_tells_something_ends_in_silence(command: tuple[str, ...]) -> None:
    assert ended_unread(*command, stderr=subprocess.PIPE) == (0, b"")


def test_standard_output_may_be_closed_from_the_start() -> None:
    command = f"exec {sys.executable} launch/plan.py --help >&-"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)


def test_a_mistake_keeps_its_code_where_the_terminal_has_hung_up() -> None:
    words = 'trap "" HUP; kill -STOP $$; "$@"; exit $(($? + 40))'
    with OnTerminal(["bash", "-c", words, "bash", *command(["model=nosuch"])]) as shell:
        wait_for(lambda: " T " in Path(f"/proc/{shell.process.pid}/stat").read_text(), at_most_s=60)
        shell.hang_up()
        shell.process.send_signal(signal.SIGCONT)
        assert shell.process.wait(timeout=240) == 42
