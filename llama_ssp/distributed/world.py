"""Starts and ends this process as a rank of a run: device, cores, rendezvous and the group of all ranks."""

import atexit
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from llama_ssp.config.schema import DeviceKind
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.control_channel import ControlChannel
from llama_ssp.distributed.environment import Ranks, read_ranks
from llama_ssp.distributed.faults import Phase, unify_failure
from llama_ssp.distributed.signals import find_agent
from llama_ssp.errors import LostRankError, PlacementError


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes of the run.

    Attributes:
        comm: the group of all ranks.
        ranks: position in the world and on this node.
        note: a sentence for the user about the choice of device, or None.
        cores: available to this process, before they were divided among the ranks that share them.
    """

    comm: Comm
    ranks: Ranks
    device: torch.device
    note: str | None
    cores: frozenset[int]
    watch: ControlChannel = field(default_factory=ControlChannel.alone)

    @property
    def free_devices(self) -> tuple[torch.device, ...]:
        """This rank's device, and the GPUs of its node that no rank uses."""
        if self.device.type == "cpu":
            return (self.device,)
        others = range(self.ranks.local_size, torch.cuda.device_count())
        return (self.device, *(torch.device("cuda", index) for index in others))


def choose_device(kind: DeviceKind, ranks: Ranks) -> tuple[torch.device, str | None]:
    """Choose this rank's device; `auto` takes GPUs if there is one for every rank of the node.

    Returns it, and a sentence for the user if GPUs are left unused; PlacementError if fewer than requested are there.
    """
    num_gpus = torch.cuda.device_count() if kind is not DeviceKind.cpu else 0
    if num_gpus >= ranks.local_size:
        return torch.device("cuda", ranks.local_rank), None
    if kind is DeviceKind.cuda:
        fewer = f"start at most {num_gpus} ranks, or " if num_gpus else ""
        raise PlacementError(
            f"device=cuda needs one GPU per rank, and this node has {num_gpus} for {ranks.local_size}: "
            f"{fewer}use device=cpu"
        )
    note = f"{ranks.local_size} ranks on a node with {num_gpus} GPUs: all ranks run on the CPU" if num_gpus else None
    return torch.device("cpu"), note


def share_cores(ranks: Ranks, *, cores: frozenset[int], sharers: tuple[int, ...]) -> int:
    """Bind this rank to its share of the cores; returns the number of threads, one per core.

    The calling thread, and those that it starts later, stay on the share. The threads of gloo, which exist by then, do
    not: if they shared a core with a computing thread, a small all-reduce would take milliseconds. A single process
    keeps the user's OMP_NUM_THREADS; that of torchrun, 1, is ignored. `sharers` are the ranks with the same available
    cores, including this one.
    """
    if ranks.local_size == 1 and "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    num_threads = max(1, len(cores) // len(sharers))
    torch.set_num_threads(num_threads)
    if 1 < len(sharers) <= len(cores):
        first = sharers.index(ranks.rank) * num_threads
        os.sched_setaffinity(0, sorted(cores)[first : first + num_threads])
    return num_threads


@contextmanager
def on_all_cores(cores: frozenset[int]) -> Iterator[None]:
    """Use all of `World.cores` in a block that makes groups, whose threads must not be bound to the share."""
    share = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, share)


@contextmanager
def start(*, device: DeviceKind, timeout_s: float, one_shot_all_reduce: bool = True) -> Iterator[World]:
    """Join the run, and leave it when the block ends; `Comm.set_timeout` can change the timeout.

    For errors see `choose_device`, and `unify_failure` if ranks are lost while starting or ending.
    """
    ranks = read_ranks(os.environ)
    chosen, note = choose_device(device, ranks)
    cores = _first_cores()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # cuDNN attention makes a plan for every new shape, that is, for every prompt length.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if ranks.size == 1:
        if chosen.type == "cpu":
            share_cores(ranks, cores=cores, sharers=(0,))
        yield World(comm=Comm.single(), ranks=ranks, device=chosen, note=note, cores=cores)
        return
    is_first = not dist.is_initialized()  # later jobs of a sweep use the first one's group: a new one would hang
    if is_first:
        _meet(ranks, backend="nccl" if chosen.type == "cuda" else "gloo", timeout_s=timeout_s)
        atexit.register(dist.destroy_process_group)
    watch, limit = _watch(ranks), f"timeouts.load_s={timeout_s:g}"
    with unify_failure(watch, Phase(doing="connecting", limit=limit)):
        sharers = _sharers(ranks, cores)
        if is_first and chosen.type == "cpu":
            share_cores(ranks, cores=cores, sharers=sharers)
        rank, size, crowded = ranks.rank, ranks.size, len(sharers) > len(cores)
        comm = Comm.of_world(rank=rank, size=size, device=chosen, crowded=crowded, tries_one_shot=one_shot_all_reduce)
        comm.set_timeout(timeout_s)
    yield World(comm=comm, ranks=ranks, device=chosen, note=note, cores=cores, watch=watch)
    with unify_failure(watch, Phase(doing="ending", limit=limit)):
        comm.set_timeout(timeout_s)
        comm.barrier()


@cache
def _first_cores() -> frozenset[int]:
    """The cores available before the first job of a sweep took its share."""
    return frozenset(os.sched_getaffinity(0))


@cache
def _sharers(ranks: Ranks, cores: frozenset[int]) -> tuple[int, ...]:
    """The ranks of this host with the same available cores as this one, including it."""
    store = distributed_c10d._get_default_store()  # has no public name
    keys = [f"llama_ssp/cores/{rank}" for rank in range(ranks.size)]
    own = json.dumps([socket.gethostname(), sorted(cores)])
    store.set(keys[ranks.rank], own)
    store.wait(keys)
    return tuple(rank for rank, key in enumerate(keys) if store.get(key).decode() == own)


def _meet(ranks: Ranks, *, backend: str, timeout_s: float) -> None:
    """Form the group of all ranks; if some do not connect in time, the lowest rank that did reports a LostRankError."""
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _store(ranks, timeout)
    except dist.DistError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        reason = f"{reason[:1].lower()}{reason[1:]}"
        lost = LostRankError(f"rank {ranks.rank} cannot reach the others, {reason}; another MASTER_PORT may be free")
        lost.speaks = ranks.rank == 1 or ranks.local_rank == 0
        raise lost from error
    here = [f"llama_ssp/here/{rank}" for rank in range(ranks.size)]
    store.set(here[ranks.rank], "")
    try:
        store.wait(here, timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
    except dist.DistError as error:
        came = [rank for rank, key in enumerate(here) if store.check([key])]
        late = [str(rank) for rank in range(ranks.size) if rank not in came]
        names = f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
        lost = LostRankError(f"{names} did not connect within timeouts.load_s={timeout_s:g}")
        lost.speaks = ranks.rank == came[0]
        raise lost from error


def _store(ranks: Ranks, timeout: timedelta) -> Store:
    """The rendezvous store: torchrun's own, or under srun one that rank 0 holds."""
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


@cache
def _watch(ranks: Ranks) -> ControlChannel:
    """This rank's control channel, one for all jobs of a sweep."""
    store = distributed_c10d._get_default_store()  # has no public name
    return ControlChannel(
        store, rank=ranks.rank, size=ranks.size, is_first_here=ranks.local_rank == 0, agent=find_agent()
    )
