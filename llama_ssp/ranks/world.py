"""Starts and ends this process as a rank of a run: device, cores, rendezvous and the group of all ranks."""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from llama_ssp.errors import SspError
from llama_ssp.ranks.comms import Comm, leave_groups
from llama_ssp.ranks.cores import LOAD, sleeps
from llama_ssp.ranks.failures import ControlChannel, Phase, guard, unify_failure
from llama_ssp.ranks.gpu import DeviceWait
from llama_ssp.ranks.process import Ranks, at_exit, find_agent, read_ranks
from llama_ssp.ranks.rendezvous import choose_device, form_group, note_on_peers, open_store, seen_by_all
from llama_ssp.settings.schema import DeviceKind

_END_S = 10.0  # how long NCCL may take to end
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes of the run.

    Attributes:
        comm: the group of all ranks.
        ranks: position in the world and on this node.
        note: a sentence for the user about the choice of device or its links, or None.
        cores: available to this process, before they were divided among the ranks that share them.
        num_sharers: the ranks that share them, including this one.
    """

    comm: Comm
    ranks: Ranks
    device: torch.device
    note: str | None
    cores: frozenset[int]
    num_sharers: int = 1
    watch: ControlChannel = field(default_factory=ControlChannel.alone)

    @property
    def free_devices(self) -> tuple[torch.device, ...]:
        """This rank's device, and the GPUs of its node that no rank uses."""
        if self.device.type == "cpu":
            return (self.device,)
        others = range(self.ranks.local_size, torch.cuda.device_count())
        return (self.device, *(torch.device("cuda", index) for index in others))


def share_cores(ranks: Ranks, *, cores: frozenset[int], sharers: tuple[int, ...]) -> None:
    """Bind this rank to its share of the cores, with one thread per core.

    The calling thread, and threads that it starts later, stay on the share. The threads of gloo, which exist by then,
    do not: if they shared a core with a computing thread, a small all-reduce would take milliseconds. A single process
    keeps the user's OMP_NUM_THREADS; torchrun's, 1, is ignored. `sharers` are the ranks with the same available cores,
    including this one.
    """
    if has_own_threads(ranks.local_size):
        return
    num_threads = max(1, len(cores) // len(sharers))
    torch.set_num_threads(num_threads)
    if 1 < len(sharers) <= len(cores):
        first = sharers.index(ranks.rank) * num_threads
        os.sched_setaffinity(0, sorted(cores)[first : first + num_threads])


def has_own_threads(num_ranks: int) -> bool:
    """Whether the user has named the number of threads; torchrun names 1 for each of several ranks."""
    return num_ranks == 1 and "OMP_NUM_THREADS" in os.environ


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
def on_free_cores(world: World) -> Iterator[None]:
    """Compute a block that loads on the cores that other programs leave free, if this rank has its cores alone."""
    before = torch.get_num_threads()
    is_alone = world.device.type == "cpu" and world.num_sharers == 1 and not has_own_threads(world.comm.size)
    torch.set_num_threads(LOAD.num_free(before) if is_alone else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def start(
    *, device: DeviceKind, timeout_s: float, report: Callable[[SspError], None] = lambda _: None
) -> Iterator[World]:
    """Join the run, and leave it when the block ends; `Comm.set_timeout` can change the timeout.

    For errors see `seen_by_all` and `choose_device`, and `unify_failure` if ranks are lost while starting or ending;
    `report` is called if this rank ends while a library keeps it, see `guard`.
    """
    ranks = read_ranks(os.environ)
    seen = seen_by_all(ranks, device, timeout_s=timeout_s)
    chosen, note = choose_device(device, ranks, seen)
    own, cores = seen[ranks.rank], frozenset(seen[ranks.rank].cores)
    sharers = tuple(rank for rank, other in enumerate(seen) if (other.host, other.cores) == (own.host, own.cores))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        # cuDNN attention makes a plan for every new shape, that is, for every prompt length.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
        num_asked = ranks.local_size if own.num_gpus >= ranks.local_size else 0
        note = note or note_on_peers(num_asked, torch.cuda.can_device_access_peer)
    if ranks.size == 1:
        if chosen.type == "cpu":
            share_cores(ranks, cores=cores, sharers=sharers)
        yield World(comm=Comm.single(), ranks=ranks, device=chosen, note=note, cores=cores)
        return
    watch, limit = _watch(ranks, open_store(ranks, timeout_s=timeout_s)), f"timeouts.load_s={timeout_s:g}"
    watch.wait_only_for(range(ranks.size))
    waits = DeviceWait(lambda: watch.has_failed, has_busy_peer=watch.has_busy_rank, timeout_s=timeout_s)
    device_wait = waits if chosen.type == "cuda" else None
    phase = Phase(doing="connecting", limit=limit)
    with unify_failure(watch, phase), guard(watch, waits, phase, report=report):
        is_first = not dist.is_initialized()  # later points of a sweep use the first one's group: a new one would hang
        if is_first:
            form_group(ranks, device=chosen, timeout_s=timeout_s)
            at_exit(partial(_part, watch, is_on_gpu=chosen.type == "cuda"))
        if device_wait:
            # A wait for the GPU does not notice a killed rank, as one for gloo does.
            watch.be_alert(is_busy=lambda: not waits.is_waiting)
        elif is_first:
            share_cores(ranks, cores=cores, sharers=sharers)
        comm = Comm.of_world(
            rank=ranks.rank,
            size=ranks.size,
            device=chosen,
            crowded=len(sharers) > len(cores) or sleeps(os.environ),
            device_wait=device_wait,
        )
        comm.set_timeout(timeout_s)
    yield World(comm=comm, ranks=ranks, device=chosen, note=note, cores=cores, num_sharers=len(sharers), watch=watch)
    with unify_failure(watch, Phase(doing="ending", limit=limit)):
        comm.set_timeout(timeout_s)
        comm.barrier()


@cache
def _watch(ranks: Ranks, store: Store) -> ControlChannel:
    """This rank's control channel, one for all points of a sweep."""
    return ControlChannel(
        store, rank=ranks.rank, size=ranks.size, is_first_here=ranks.local_rank == 0, agent=find_agent()
    )


def _part(watch: ControlChannel, *, is_on_gpu: bool) -> None:
    """Leave the group of all ranks at the end of the process."""
    watch.leave()
    if is_on_gpu:
        gc.collect()  # NCCL would wait for graphs that hold its kernels
        Thread(target=_end_anyway, daemon=True, name="end").start()
    leave_groups()


def _end_anyway() -> None:
    """End the process if NCCL waits for a rank that has ended; all records are written."""
    time.sleep(_END_S)
    _log.warning("left without NCCL, which had not ended after %g s; all results are written", _END_S)
    os._exit(0)
