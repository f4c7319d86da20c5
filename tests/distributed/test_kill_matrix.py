"""Every signal, to every rank, in every phase: the job ends soon, in one sentence, and can be resumed.

Under torchrun, and as plain `srun` starts ranks, without SLURM: nobody ends the ranks there but themselves. The cells
on a real SLURM are in tests/slurm.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.commands import Popen, command
from tests.helpers.disturbed import (
    CELLS,
    NUM_SAMPLES,
    Cell,
    check_end,
    check_resumption,
    has_begun,
    is_alive,
    lines,
    pid_of_rank,
    settings,
    wait_for,
)
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.distributed(2)

# Each signal, rank and phase occurs once among those that always run; a stopped rank costs torchrun half a minute.
ALWAYS = {
    ("torchrun", Cell(signal.SIGTERM, 1, "loading")),
    ("srun", Cell(signal.SIGSTOP, 1, "prefill")),
    ("srun", Cell(signal.SIGKILL, 0, "decoding")),
}
AT_MOST_S = {"torchrun": 40, "srun": 15}


def cells() -> list[object]:
    return [
        pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.slow, id=f"{pair[0]}, {pair[1]}")
        for pair in product(AT_MOST_S, CELLS)
    ]


def started(
    launcher: str, cell: Cell, run_dir: Path, *, before: tuple[str, ...] = (), more: tuple[str, ...] = ()
) -> list[Popen]:
    """The processes that somebody waits for: torchrun's, or the ranks themselves; `before` stands before a command."""
    overrides = [*settings(cell, run_dir), *more]
    commands = [[*before, *command(overrides, num_ranks=2)]]
    environments: list[dict[str, str]] = [{}]
    if launcher == "srun":
        commands = [[*before, *command(overrides)]] * 2
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        step["SLURM_JOB_ID"] = str(os.getpid() * 18 + CELLS.index(cell))  # the port follows from it
        environments = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
    return [
        subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **environment}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for words, environment in zip(commands, environments, strict=True)
    ]  # fmt: skip


@pytest.fixture
def running(launcher: str, cell: Cell, tmp_path: Path) -> Iterator[list[Popen]]:
    """A job that has come to the phase."""
    processes = started(launcher, cell, tmp_path / "run")
    wait_for(
        lambda: has_begun(cell, tmp_path / "run") or any(process.poll() is not None for process in processes),
        at_most_s=120,
    )
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("launcher", "cell"), cells())
def test_a_disturbed_rank_ends_the_job_in_a_sentence_and_nothing_is_lost(
    launcher: str, cell: Cell, running: list[Popen], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
    os.kill(ranks[cell.rank], cell.number)
    stopped = running[cell.rank] if launcher == "srun" and cell.number is signal.SIGSTOP else None
    waited = [process for process in running if process is not stopped]
    errors = [process.communicate(timeout=AT_MOST_S[launcher])[1] for process in waited]
    assert all(process.returncode for process in waited)
    if stopped:  # SLURM wakes it up before it ends it
        for number in (signal.SIGCONT, signal.SIGTERM):
            stopped.send_signal(number)
        errors.append(stopped.communicate(timeout=15)[1])
    assert not any(is_alive(pid) for pid in ranks)
    check_end(cell, run_dir, errors)
    own = "".join(errors).partition("torch/distributed/elastic")[0] if launcher == "torchrun" else "".join(errors)
    assert "Traceback" not in own
    check_resumption(cell, run_dir, lines(run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", AT_MOST_S)
def test_a_rank_killed_in_another_copy_ends_the_job_in_a_sentence_long_before_the_timeout(
    launcher: str, rank: int, tmp_path: Path
) -> None:
    cell, run_dir = Cell(signal.SIGKILL, rank, "decoding"), tmp_path / "run"
    copies = ("placement=replicas", "placement.num_replicas=2", "timeouts.decode_s=600")
    running = started(launcher, cell, run_dir, more=copies)
    try:
        wait_for(lambda: has_begun(cell, run_dir) or any(one.poll() is not None for one in running), at_most_s=120)
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
        os.kill(ranks[rank], signal.SIGKILL)
        errors = [process.communicate(timeout=AT_MOST_S["srun"])[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert all(process.returncode for process in running)
    assert not any(is_alive(pid) for pid in ranks)
    check_end(cell, run_dir, errors)
    assert "(connection closed); the same command" in (run_dir / "status").read_text()
    check_resumption(cell, run_dir, lines(run_dir), more=copies, num_ranks=2)


def test_a_disk_that_is_full_for_rank_0_ends_all_ranks_in_its_sentence(tmp_path: Path) -> None:
    cell = Cell(signal.SIGTERM, 0, "decoding")
    short_files = ("bash", "-c", 'ulimit -f 4 && exec "$@"', "bash")
    processes = started("srun", cell, tmp_path / "run", before=short_files)
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], errors
    *progress, sentence = errors[0].splitlines()
    assert sentence.startswith(f"cannot use {tmp_path}/run/run.jsonl: file too large; free some space"), errors
    assert all(f"of {NUM_SAMPLES} completions" in line for line in progress), errors
    assert errors[1] == ""
    check_resumption(cell, tmp_path / "run", lines(tmp_path / "run")[:1])
