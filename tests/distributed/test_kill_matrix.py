"""Every signal, to every rank, in every phase: the job ends soon, in one sentence, and can be resumed.

Under torchrun, and as plain `srun` starts ranks, without SLURM: nobody ends the ranks there but themselves. The cells
on a real SLURM are in tests/extensions/slurm. Jobs that lose their terminal or their torchrun agent are interrupted.
"""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from llama_ssp.errors import InterruptedRun
from tests.helpers.commands import Popen, command, run, started
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
from tests.helpers.gpu_faults import steps
from tests.helpers.terminals import OnTerminal

pytestmark = pytest.mark.distributed(2)

HEAVY = {("srun", Cell(signal.SIGKILL, 0, "decoding"))}
AT_MOST_S = {"torchrun": 40, "srun": 15}
COPIES = ("placement=replicas", "placement.num_replicas=2")
OVERLAP = ("placement=own_gpu", "speculation.overlap=true")
STAGES = ("placement.target.stages=2",)
LONG = Cell(signal.SIGHUP, 0, "decoding")
"""A run that cannot end before it is met."""


class Loss(NamedTuple):
    """What a job loses, on how many ranks, and how long after the begin of a phase."""

    what: str
    num_ranks: int
    phase: str
    delay_s: float

    def __str__(self) -> str:
        return f"{self.what} of {self.num_ranks} ranks {self.delay_s} s after {self.phase}"


SIGNAL, TERMINAL, AGENT = "SIGHUP", "closed terminal", "killed agent"
LOSSES = [
    Loss(TERMINAL, 2, "decoding", 0.0),
    Loss(TERMINAL, 1, "loading", 0.0),
    Loss(AGENT, 1, "decoding", 0.0),
    Loss(AGENT, 2, "loading", 0.0),
] + [
    Loss(what, num_ranks, phase, delay_s)
    for what, num_ranks in ((SIGNAL, 1), (SIGNAL, 2), (TERMINAL, 1), (TERMINAL, 2), (AGENT, 2))
    for phase in ("loading", "decoding")
    for delay_s in (0.05, 0.3, 0.8, 1.5)
]


def cells() -> list[object]:
    return [
        pytest.param(*pair, marks=pytest.mark.heavy if pair in HEAVY else pytest.mark.slow, id=f"{pair[0]}, {pair[1]}")
        for pair in product(AT_MOST_S, CELLS)
    ]


@contextmanager
def job(
    launcher: str, cell: Cell, run_dir: Path, *, before: tuple[str, ...] = (), more: tuple[str, ...] = ()
) -> Iterator[list[Popen]]:
    """The processes that somebody waits for: torchrun's, or the ranks themselves, once the phase of the cell has begun.

    `before` stands before a command.
    """
    overrides = [*settings(cell, run_dir), *more]
    commands = [[*before, *command(overrides, num_ranks=2)]]
    environments: list[dict[str, str]] = [{}]
    if launcher == "srun":
        commands = [[*before, *command(overrides)]] * 2
        environments = steps()
    with ExitStack() as kept:
        running = [
            kept.enter_context(started(words, env=os.environ | environment, stdout=subprocess.DEVNULL))
            for words, environment in zip(commands, environments, strict=True)
        ]
        wait_for(lambda: has_begun(cell, run_dir) or any(one.poll() is not None for one in running), at_most_s=120)
        yield running


@pytest.mark.parametrize(("launcher", "cell"), cells())
def test_a_disturbed_rank_ends_the_job_in_a_sentence_and_nothing_is_lost(
    launcher: str, cell: Cell, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with job(launcher, cell, run_dir) as running:
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
@pytest.mark.parametrize(("rank", "placement"), [(0, COPIES), (1, COPIES), (1, OVERLAP), (0, STAGES), (1, STAGES)])
@pytest.mark.parametrize("launcher", AT_MOST_S)
def test_a_rank_killed_in_another_copy_or_stage_or_with_the_draft_ends_the_job_in_a_sentence_long_before_the_timeout(
    launcher: str, rank: int, placement: tuple[str, ...], tmp_path: Path
) -> None:
    cell, run_dir, more = (
        Cell(signal.SIGKILL, rank, "decoding"),
        tmp_path / "run",
        (*placement, "timeouts.decode_s=600"),
    )
    with job(launcher, cell, run_dir, more=more) as running:
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
        os.kill(ranks[rank], signal.SIGKILL)
        errors = [process.communicate(timeout=AT_MOST_S[launcher])[1] for process in running]
    assert all(process.returncode for process in running)
    assert not any(is_alive(pid) for pid in ranks)
    check_end(cell, run_dir, errors)
    assert "(connection closed); run the same command" in (run_dir / "status").read_text()
    check_resumption(cell, run_dir, lines(run_dir), more=more, num_ranks=2)
    if placement is OVERLAP:
        assert run([*settings(cell, tmp_path / "whole"), *OVERLAP], num_ranks=2).returncode == 0
        ids = [[line["token_ids"] for line in lines(folder)] for folder in (run_dir, tmp_path / "whole")]
        assert ids[0] == ids[1]
        overlap = json.loads((run_dir / "summary.json").read_text())["overlap"]
        assert overlap["num_dropped_tokens"] > 0
        assert len(overlap["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_job_that_loses_something_at_any_time_is_interrupted(loss: Loss, tmp_path: Path) -> None:
    """It ends soon, without a traceback, and can be resumed."""
    run_dir = tmp_path / "run"
    words = command(settings(LONG, run_dir), num_ranks=2)
    words[words.index("2")] = str(loss.num_ranks)
    if loss.num_ranks == 1 and loss.what != AGENT:
        words = command(settings(LONG, run_dir))
    phase = Cell(signal.SIGHUP, 0, loss.phase)
    with OnTerminal(words) as shell:
        shell.wait_for(lambda: has_begun(phase, run_dir, num_ranks=loss.num_ranks), at_most_s=300)
        begin_s = time.monotonic()
        shell.wait_for(lambda: time.monotonic() - begin_s > loss.delay_s, at_most_s=60)
        ranks = [pid_of_rank(run_dir, rank) for rank in range(loss.num_ranks)]
        if loss.what == TERMINAL:
            shell.hang_up()
        elif loss.what == AGENT:
            shell.process.kill()
        else:
            for pid in {shell.process.pid, *ranks}:
                os.kill(pid, signal.SIGHUP)
        try:
            shell.wait_for(lambda: not any(map(is_alive, [shell.process.pid, *ranks])), at_most_s=15)
        finally:
            for pid in filter(is_alive, ranks):
                os.kill(pid, signal.SIGKILL)
        shell.read()
    assert (run_dir / "status").read_text() == "interrupted\n", shell.shown
    assert 'launch/run.py", line' not in shell.shown, "a rank showed a traceback"
    if loss.what != TERMINAL:
        assert len([line for line in shell.shown.splitlines() if line.startswith("interrupted")]) == 1, shell.shown
    if shell.process.pid in ranks:
        assert shell.process.returncode == InterruptedRun.exit_code
    check_resumption(LONG, run_dir, lines(run_dir))


@pytest.mark.slow
def test_a_disk_that_is_full_for_rank_0_ends_all_ranks_in_its_sentence(tmp_path: Path) -> None:
    cell = Cell(signal.SIGTERM, 0, "decoding")
    short_files = ("bash", "-c", 'ulimit -f 4 && exec "$@"', "bash")
    with job("srun", cell, tmp_path / "run", before=short_files) as running:
        errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2], errors
    *progress, sentence = errors[0].splitlines()
    assert sentence.startswith(f"cannot use {tmp_path}/run/run.jsonl: file too large; free some space"), errors
    assert all(f"of {NUM_SAMPLES} completions" in line for line in progress), errors
    assert errors[1] == ""
    check_resumption(cell, tmp_path / "run", lines(tmp_path / "run")[:1])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["loading", "prefill"])
def test_a_rank_out_of_memory_ends_the_job_with_rank_and_cause_in_a_sentence(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    cell, run_dir = Cell(signal.SIGTERM, 1, phase), tmp_path / "run"
    with job("srun", cell, run_dir, more=("timeouts.load_s=600", "timeouts.decode_s=600")) as running:
        ranks = [pid_of_rank(run_dir, rank) for rank in (0, 1)]
        resource.prlimit(ranks[1], resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        errors = [process.communicate(timeout=AT_MOST_S["srun"])[1] for process in running]
    assert [process.returncode for process in running] == [3, 3], errors
    assert not any(is_alive(pid) for pid in ranks)
    said = [line for text in errors for line in text.splitlines() if "out of memory" in line]
    assert len(said) == 1, errors
    assert said[0].endswith("(rank 1)") or said[0].startswith("rank 1 failed while "), errors
    assert (run_dir / "status").read_text() == f"3: {said[0]}\n"
    assert "Traceback" not in "".join(errors)
    check_resumption(cell, run_dir, lines(run_dir))
