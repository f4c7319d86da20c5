"""Two ranks on the stub device, one of which is lost: the other one ends in time, in the sentence of a run on CPUs.

The device waits for a peer that is gone, and never stops. So a wait of the host without a limit would not end.
"""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.disturbed import lines, wait_for
from tests.helpers.gpu_faults import AT_MOST_S, CELLS, FULL, KILLED, STUCK, Cell, arguments, check_sentence, steps
from tests.stub_gpu.process import Stub, end


class Job(NamedTuple):
    """Both ranks, their output, and the folder that fills the device of the one that is to be lost."""

    ranks: list[subprocess.Popen[str]]
    outputs: list[Path]
    control: Path

    def said(self) -> list[str]:
        return [line for file in self.outputs for line in file.read_text().splitlines()]


@pytest.fixture
def job(stub: Stub, cell: Cell, tmp_path: Path) -> Iterator[Job]:
    """A job that decodes."""
    control, outputs, ranks = tmp_path / "control", [tmp_path / f"{rank}.txt" for rank in (0, 1)], []
    control.mkdir()
    for rank, step in enumerate(steps()):
        settings: dict[str, Any] = {**step, "STUB_GPU_COUNT": 2}
        if rank == cell.rank:
            settings["STUB_GPU_CONTROL"] = control
        ranks.append(stub.start(*arguments(cell, tmp_path), output=outputs[rank], **settings))
    try:
        wait_for(
            lambda: len(lines(tmp_path / "run")) > 1 or any(each.poll() is not None for each in ranks), at_most_s=300
        )
        yield Job(ranks, outputs, control)
    finally:
        for each in ranks:
            end(each)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_lost_on_a_gpu_ends_the_run_in_time_with_sentence_and_status(
    cell: Cell, job: Job, tmp_path: Path
) -> None:
    victim, other = job.ranks[cell.rank], job.ranks[1 - cell.rank]
    assert (victim.poll(), other.poll()) == (None, None), job.said()
    if cell.fault == FULL:
        (job.control / "full").touch()
        assert [each.wait(AT_MOST_S[FULL]) for each in job.ranks] == [3, 3], job.said()
    else:
        victim.send_signal(signal.SIGKILL if cell.fault == KILLED else signal.SIGSTOP)
        assert other.wait(AT_MOST_S[cell.fault]) == 1, job.said()
    check_sentence(cell, tmp_path / "run", job.said())


HANGING = Cell(STUCK, cuda_graphs=True, task="generate", rank=1, num_replicas=2, batch_size=2)


@pytest.mark.parametrize("cell", [HANGING], ids=str)
def test_a_gpu_that_hangs_is_given_up_in_time_although_another_replica_is_at_work(
    cell: Cell, job: Job, tmp_path: Path
) -> None:
    """The other replica ends its share, and its host then waits without its GPU."""
    (job.control / "stuck").touch()
    assert [each.wait(AT_MOST_S[STUCK]) for each in job.ranks] == [1, 1], job.said()
    check_sentence(cell, tmp_path / "run", job.said())
