"""Where ranks meet: the rendezvous store, and the process group that is made with it.

CPUs    gloo
GPUs    NCCL for tensors on GPUs, gloo for those on the host, in one group
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it would keep the group by its default arguments
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from llama_ssp.distributed.environment import Ranks
from llama_ssp.errors import LostRankError

# torch's watchdog would abort the process without a sentence; `gpu.device_wait` and `gpu.watchdog` end runs.
_OWN_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


@cache
def open_store(ranks: Ranks, *, timeout_s: float) -> Store:
    """Reach the rendezvous store: torchrun's own, or under srun one of rank 0; LostRankError if it is not there."""
    timeout = timedelta(seconds=timeout_s)
    try:
        if "RANK" in os.environ:
            store: Store = next(rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))[0]
            return store
        # A plain `srun python` meets on the first node, at a port derived from the job id.
        host = os.environ.get("MASTER_ADDR") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
        if ranks.local_size == ranks.size:
            host = os.environ.get("MASTER_ADDR", "localhost")
        port = os.environ.get("MASTER_PORT") or 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        return dist.TCPStore(  # type: ignore[attr-defined] # torch's types do not export it
            host, int(port), ranks.size, is_master=ranks.rank == 0, timeout=timeout, wait_for_workers=False
        )
    except dist.DistError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        reason = f"{reason[:1].lower()}{reason[1:]}"
        lost = LostRankError(f"rank {ranks.rank} cannot reach the others, {reason}; another MASTER_PORT may be free")
        lost.speaks = ranks.rank == 1 or ranks.local_rank == 0
        raise lost from error


def meet(ranks: Ranks, *, device: torch.device, timeout_s: float) -> None:
    """Form the group of all ranks; if some do not connect in time, the lowest rank that did reports a LostRankError."""
    store = open_store(ranks, timeout_s=timeout_s)
    backend, own_gpu = "gloo", None
    if device.type == "cuda":
        for name, value in _OWN_WATCHDOG.items():
            os.environ.setdefault(name, value)
        backend, own_gpu = "cpu:gloo,cuda:nccl", device
    here = [f"llama_ssp/here/{rank}" for rank in range(ranks.size)]
    store.set(here[ranks.rank], "")
    wait_for_all(store, here, ranks=ranks, timeout_s=timeout_s)
    try:
        dist.init_process_group(
            backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timedelta(seconds=timeout_s),
            device_id=own_gpu,
        )  # fmt: skip
    except dist.DistError as error:
        raise _lost(store, here, ranks=ranks, timeout_s=timeout_s) from error


def wait_for_all(store: Store, keys: Sequence[str], *, ranks: Ranks, timeout_s: float) -> None:
    """Wait until every rank has set its key; the lowest that did reports a LostRankError if others do not in time."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise _lost(store, keys, ranks=ranks, timeout_s=timeout_s) from error


def _lost(store: Store, keys: Sequence[str], *, ranks: Ranks, timeout_s: float) -> LostRankError:
    """The error that names the ranks that have not set their keys."""
    try:
        came = [rank for rank, key in enumerate(keys) if store.check([key])]
    except dist.DistError:  # the store has ended with rank 0
        came = list(range(1, ranks.size))
    late = [str(rank) for rank in range(ranks.size) if rank not in came]
    names = f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}" if late else "all ranks came, but"
    lost = LostRankError(f"{names} did not connect within timeouts.load_s={timeout_s:g}")
    lost.speaks = ranks.rank == came[0]
    return lost
