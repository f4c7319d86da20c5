"""Two ranks on the stub device, one of which is lost: the other one ends in time, in the sentence of a run on CPUs.

A peer that is gone is waited for by the device, and never by the host: so a wait without a limit would never end. Ranks
start as plain `srun` starts them: nobody ends them but themselves.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.disturbed import lines, wait_for
from tests.stub_gpu.process import Stub, end

KILLED, STOPPED, FULL = FAULTS = ("killed", "stopped", "out of memory")
DECODE_S = 8
AT_MOST_S = {KILLED: 10, STOPPED: DECODE_S + 12, FULL: 20}
"""From the fault to the end of the other rank, with a second for each call over the control channel."""
NUM_PROMPTS = 60


class Cell(NamedTuple):
    """Which fault meets which rank of which task, and how rounds run."""

    fault: str
    cuda_graphs: bool
    task: str
    rank: int

    def __str__(self) -> str:
        how = "graphs" if self.cuda_graphs else "eager"
        return f"rank {self.rank} {self.fault}, task={self.task}, {how}"


CELLS = [
    Cell(fault, cuda_graphs, task, rank)
    for fault, cuda_graphs, (task, rank) in product(FAULTS, (True, False), (("generate", 1), ("compare", 0)))
]


class Job(NamedTuple):
    """Both ranks, and the folder that fills the device of one of them."""

    ranks: list[subprocess.Popen[str]]
    control: Path


@pytest.fixture
def job(stub: Stub, cell: Cell, tmp_path: Path) -> Iterator[Job]:
    """A job that decodes. Prompts grow, so that it needs more memory again and again."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join("import os; " * (3 * number) + "\n" for number in range(1, NUM_PROMPTS + 1)))
    overrides = [
        f"task={cell.task}", "device=cuda", f"cuda_graphs={str(cell.cuda_graphs).lower()}", f"prompts={prompts}",
        "max_new_tokens=12", "num_samples=20", "ignore_eos=true", f"timeouts.decode_s={DECODE_S}",
        f"run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    control = tmp_path / "control"
    control.mkdir()
    step = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": 2, "STUB_GPU_COUNT": 2}
    step["SLURM_JOB_ID"] = os.getpid() * 12 + CELLS.index(cell)  # the port follows from it
    ranks = []
    for rank in (0, 1):
        settings: dict[str, object] = {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        if rank == cell.rank:
            settings["STUB_GPU_CONTROL"] = control
        ranks.append(stub.start("launch/run.py", *overrides, output=tmp_path / f"{rank}.txt", **settings))
    try:
        wait_for(
            lambda: len(lines(tmp_path / "run")) > 1 or any(each.poll() is not None for each in ranks), at_most_s=300
        )
        yield Job(ranks, control)
    finally:
        for each in ranks:
            end(each)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_rank_lost_on_a_gpu_ends_the_run_in_time_with_sentence_and_status(
    cell: Cell, job: Job, tmp_path: Path
) -> None:
    victim, other = job.ranks[cell.rank], job.ranks[1 - cell.rank]
    outputs = [tmp_path / f"{rank}.txt" for rank in (0, 1)]
    assert (victim.poll(), other.poll()) == (None, None), [file.read_text() for file in outputs]
    if cell.fault == FULL:
        (job.control / "full").touch()
        codes = [each.wait(AT_MOST_S[FULL]) for each in job.ranks]
        assert codes == [3, 3], [file.read_text() for file in outputs]
    else:
        victim.send_signal(signal.SIGKILL if cell.fault == KILLED else signal.SIGSTOP)
        assert other.wait(AT_MOST_S[cell.fault]) == 1, [file.read_text() for file in outputs]
    said = [line for file in outputs for line in file.read_text().splitlines()]
    cause = "connection closed" if cell.fault == KILLED else f"no answer within timeouts.decode_s={DECODE_S}"
    sentence = f"rank {cell.rank} is missing while decoding ({cause}); run the same command with the same run_dir"
    code = 1
    if cell.fault == FULL:
        sentence, code = f"rank {cell.rank} failed while decoding: out of memory", 3
    assert len([line for line in said if line.startswith(sentence)]) == 1, said
    assert (tmp_path / "run" / "status").read_text().startswith(f"{code}: {sentence}")
    assert "Traceback" not in "\n".join(said)
