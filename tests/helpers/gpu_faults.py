"""Runs of two ranks with a GPU each, one of which is lost, and what must hold when the other one has ended.

Ranks start as plain `srun` starts them: nobody ends them but themselves.
"""

import os
from collections.abc import Sequence
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

FAULTS = KILLED, STOPPED, FULL = ("killed", "stopped", "out of memory")
STUCK = "stuck"
"""A kernel of the GPU does not end; its host is well."""
DECODE_S = 15
AT_MOST_S = {KILLED: 15, STOPPED: DECODE_S + 15, FULL: 30, STUCK: DECODE_S + 15}
"""From the fault to the end of the other rank, which also calls the lost one over the control channel."""
_NUM_PROMPTS = 128
_numbers = count()


class Cell(NamedTuple):
    """Which fault meets which rank of which task, and how rounds run."""

    fault: str
    cuda_graphs: bool
    task: str
    rank: int
    num_replicas: int = 1
    batch_size: int = 32
    overlaps: bool = False

    def __str__(self) -> str:
        how = "graphs" if self.cuda_graphs else "eager"
        return f"rank {self.rank} {self.fault}, task={self.task}, {how}" + self.overlaps * ", overlapped"


CELLS = [
    Cell(fault, cuda_graphs, task, rank)
    for fault, cuda_graphs, (task, rank) in product(FAULTS, (True, False), (("generate", 1), ("compare", 0)))
] + [
    Cell(KILLED, cuda_graphs=True, task="generate", rank=1, overlaps=True),
    Cell(STOPPED, cuda_graphs=True, task="generate", rank=0, overlaps=True),
]


def arguments(cell: Cell, folder: Path) -> list[str]:
    """The command line of a run that outlives the fault. Its prompts grow, so that it soon needs more memory."""
    prompts = folder / "prompts.txt"
    prompts.write_text("".join("import os; " * (2 * number) + "\n" for number in range(1, _NUM_PROMPTS + 1)))
    overlap = ["placement=own_gpu", "speculation.overlap=true"] if cell.overlaps else []
    return [
        "launch/run.py",
        *overlap,
        f"task={cell.task}",
        "device=cuda",
        f"cuda_graphs={str(cell.cuda_graphs).lower()}",
        f"prompts={prompts}",
        "max_new_tokens=12",
        f"batch_size={cell.batch_size}",
        "ignore_eos=true",
        f"timeouts.decode_s={DECODE_S}",
        f"run_dir={folder / 'run'}",
        f"placement.num_replicas={cell.num_replicas}",
    ]


def steps() -> list[dict[str, str]]:
    """The variables by which both ranks of a new run know each other."""
    job_id = str(os.getpid() * 100 + next(_numbers))  # the port follows from it
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": job_id}
    return [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]


def check_sentence(cell: Cell, run_dir: Path, said: Sequence[str]) -> None:
    """Assert that the run has ended in one sentence about the lost rank, which is its status too."""
    cause = "connection closed" if cell.fault == KILLED else f"no answer within timeouts.decode_s={DECODE_S}"
    sentence = f"rank {cell.rank} is missing while decoding ({cause}); run the same command with the same run_dir"
    code = 1
    if cell.fault == FULL:
        sentence, code = f"rank {cell.rank} failed while decoding: out of memory", 3
    if cell.fault == STUCK:
        sentence = f"ranks lost each other while decoding ({cause}), though all are alive"
    assert len([line for line in said if sentence in line]) == 1, said
    assert (run_dir / "status").read_text().startswith(f"{code}: {sentence}")
    assert not any("Traceback" in line for line in said), said
