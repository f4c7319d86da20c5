"""Where ranks meet: the rendezvous store, and the process group that is made with it.

CPUs    gloo
GPUs    NCCL for tensors on GPUs, gloo for those on the host, in one group
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it would keep the group by its default arguments
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's types do not export it
from torch.distributed.distributed_c10d import Store

from llama_ssp.errors import LostRankError
from llama_ssp.ranks.environment import LOOPBACK, Ranks, are_all_here, listen, stay_on_loopback

# torch's watchdog would abort the process without a sentence; `gpu.device_wait` and `gpu.watchdog` end runs.
_OWN_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_HEED_EVERY_S = 1.0
"""How long torch may keep the main thread, which must answer signals meanwhile."""


@cache
def open_store(ranks: Ranks, *, timeout_s: float) -> Store:
    """Reach the rendezvous store: torchrun's own, or else one of rank 0; LostRankError if it is not there."""
    environ = os.environ
    is_of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A plain `srun python` meets on the first node, at a port derived from the job id.
    host = environ.get("MASTER_ADDR") or environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
    if are_all_here(environ) and not is_of_agent:
        host = LOOPBACK
    port = int(environ.get("MASTER_PORT") or 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000)
    try:
        if ranks.rank == 0 and not is_of_agent:
            return hold_store(host, port, size=ranks.size, timeout_s=timeout_s)
        return _connect(host, port, size=ranks.size, timeout_s=timeout_s)
    except (dist.DistError, OSError) as error:
        reason = f"{host}:{port} does not answer within timeouts.load_s={timeout_s:g}"
        if isinstance(error, OSError):
            reason = f"{host}:{port}: {(error.strerror or str(error)).lower()}"
        lost = LostRankError(f"rank {ranks.rank} cannot reach the others, {reason}; another MASTER_PORT may be free")
        lost.speaks = ranks.rank == 1 or ranks.local_rank == 0
        raise lost from error


def hold_store(host: str, port: int, *, size: int, timeout_s: float) -> TCPStore:
    """Make a store that others reach at `host`; for port 0 at a free one, which it then names."""
    with listen(host, port) as server:
        port = server.getsockname()[1]
        return _tcp_store(host, port, size=size, timeout_s=timeout_s, listen_fd=server.detach())


def _connect(host: str, port: int, *, size: int, timeout_s: float) -> TCPStore:
    """Reach a store, in attempts between which signals are heeded."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            store = _tcp_store(host, port, size=size, timeout_s=min(timeout_s, _HEED_EVERY_S))
        except dist.DistError:
            if time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _tcp_store(host: str, port: int, *, size: int, timeout_s: float, listen_fd: int | None = None) -> TCPStore:
    return TCPStore(
        host, port, size, is_master=listen_fd is not None, timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False, master_listen_fd=listen_fd,
    )  # fmt: skip


def meet(ranks: Ranks, *, device: torch.device, timeout_s: float) -> None:
    """Form the group of all ranks; if some do not connect in time, the lowest rank that did reports a LostRankError."""
    stay_on_loopback()
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
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=min(timeout_s, _HEED_EVERY_S)))
        except dist.DistError as error:
            if isinstance(error, dist.DistStoreError) and time.monotonic() < deadline:
                continue
            raise _lost(store, keys, ranks=ranks, timeout_s=timeout_s) from error
        return


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
