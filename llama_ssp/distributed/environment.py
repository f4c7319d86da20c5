"""Reads this process's rank from the environment of torchrun or SLURM, without importing torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Rank and size, in the world and on this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """Read the ranks from torchrun's variables, else from those of a SLURM step; by default a single rank.

    A batch script outside a step also has SLURM_PROCID; only a step has SLURM_STEP_ID.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return Ranks(rank=0, size=1, local_rank=0, local_size=1)
    rank, size = int(environ[names[0]]), int(environ[names[1]])
    local_rank = int(environ.get(names[2], rank))
    local_size = _of_node(environ.get(names[3], str(size)), node=int(environ.get("SLURM_NODEID", 0)))
    return Ranks(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def _of_node(counts: str, *, node: int) -> int:
    """A node's number of tasks: SLURM writes "4(x2),3" for four on each of two nodes and three on the last one."""
    number = ""
    for each in counts.split(","):
        number, _, repeated = each.partition("(x")
        node -= int(repeated.rstrip(")") or 1)
        if node < 0:
            break
    return int(number)
