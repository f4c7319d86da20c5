"""Ranks that share a GPU: `torchrun ... -m benchmarks.first_hour.shared_gpu PROGRAM ARGUMENTS`, a file or a module.

NCCL compares hosts and buses: each rank says that it is a host of its own, which makes nodes with sockets between them.
From 2.30 on NCCL lets ranks of one host share a GPU. They take turns: it shows values, captures and faults, no speed.
"""

import os
import runpy
import sys
from collections.abc import Mapping

import torch

from benchmarks.first_hour.runner import SHARES
from llama_ssp.ranks import rendezvous


def program(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What stands before a program of several ranks."""
    return ["-m", "benchmarks.first_hour.shared_gpu"] if int(environment.get(SHARES, "1")) > 1 else []


def variables(rank: str, version: tuple[int, ...]) -> dict[str, str]:
    """By which NCCL of a version lets a rank share a GPU."""
    common = {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    own = {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket"}
    return common | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= (2, 30) else own)


if __name__ == "__main__":
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else (0,)
    os.environ.update(variables(os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0"), nccl))
    rendezvous._suffice = lambda node: all(rank.num_gpus for rank in node)
    del sys.argv[0]
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    run(sys.argv[0], run_name="__main__")
