"""Programs whose output nobody reads any more, as behind `| head`, end without a complaint, and with their own code."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import command, start
from tests.helpers.disturbed import wait_for
from tests.helpers.lanes import heavy, slow
from tests.helpers.repository import ROOT
from tests.helpers.terminals import OnTerminal

pytestmark = pytest.mark.seconds


def ended_unread(program: str, *arguments: str, stderr: int) -> tuple[int, bytes | None]:
    """Exit code and standard error (None where it has gone the same way) of a program of which nobody reads a word."""
    command = [sys.executable, f"launch/{program}", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr) as running:
        assert running.stdout
        running.stdout.close()
        complaint = running.stderr.read() if running.stderr else None
    return running.returncode, complaint


@pytest.mark.parametrize("task", [slow("task=compare"), heavy("task=generate")])
def test_a_run_is_interrupted_and_can_be_resumed(task: str, tmp_path: Path) -> None:
    """One task writes texts as they are, the other has rich write headings first."""
    run_dir = tmp_path / "run"
    with start([task, "prompt=def f", "max_new_tokens=400", "ignore_eos=true", f"run_dir={run_dir}"]) as run:
        assert run.stdout
        assert run.stderr
        run.stdout.read(1)
        run.stdout.close()
        complaint = run.stderr.read()
    assert run.returncode == 4
    assert complaint.endswith(f"interrupted; run_dir={run_dir} with the same settings goes on from here\n")
    assert "Error" not in complaint
    assert (run_dir / "status").read_text() == "interrupted\n"


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


@pytest.mark.parametrize("task", [slow("task=generate"), slow("task=compare")])
def test_a_run_that_ignores_the_hangup_goes_on_without_its_terminal_and_its_shell(task: str, tmp_path: Path) -> None:
    run_dir, said = tmp_path / "run", tmp_path / "said"
    settings = [task, "prompt=def f", "max_new_tokens=24", "ignore_eos=true", f"run_dir={run_dir}"]
    words = f'trap "" HUP; "$@" 2>> {said} & until grep -s running {run_dir}/status; do sleep 0.1; done'
    with OnTerminal(["bash", "-c", words, "bash", *command(settings)]) as shell:
        shell.wait_for(lambda: shell.process.poll() is not None, at_most_s=240)
        shell.hang_up()
        wait_for(lambda: (run_dir / "status").read_text() != "running\n", at_most_s=240)
    assert (run_dir / "status").read_text() == "done\n"
    wait_for(lambda: "records in" in said.read_text(), at_most_s=60)
    assert "Error" not in said.read_text()
    assert "ignored" not in said.read_text()


def test_a_mistake_keeps_its_code_where_the_terminal_has_hung_up() -> None:
    words = 'trap "" HUP; kill -STOP $$; "$@"; exit $(($? + 40))'
    with OnTerminal(["bash", "-c", words, "bash", *command(["model=nosuch"])]) as shell:
        wait_for(lambda: " T " in Path(f"/proc/{shell.process.pid}/stat").read_text(), at_most_s=60)
        shell.hang_up()
        shell.process.send_signal(signal.SIGCONT)
        assert shell.process.wait(timeout=240) == 42
