"""Rendezvous of ranks: the store, the facts that they exchange, their devices, and the process group.

CPUs    gloo
GPUs    NCCL for tensors on GPUs, gloo for tensors on the host, in one group; if every rank of every node has a GPU
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, combinations
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it would keep the group by its default arguments
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's types do not export it
from torch.distributed.distributed_c10d import Store

from llama_ssp.errors import LostRankError, PlacementError
from llama_ssp.ranks.process import Ranks, launcher_of, listen, meeting_host, number_in, stay_on_loopback
from llama_ssp.settings.schema import DeviceKind
from llama_ssp.terminal.unread import complain

# torch's watchdog would abort the process without a sentence; `gpu.DeviceWait` and `failures.guard` end runs.
_OWN_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_QUIET_S = 10.0  # how long ranks wait for others without a word
_HEED_EVERY_S = 1.0
"""Time that torch may keep the main thread, which must answer signals meanwhile."""
_MOST_NAMED = 4


def open_store(ranks: Ranks, *, timeout_s: float) -> Store:
    """Return the store of all points of a sweep: torchrun's own, or else rank 0's; LostRankError if it is not there."""
    if ranks not in _stores:
        _stores[ranks] = _opened(ranks, timeout_s=timeout_s)
    return _stores[ranks]


_stores: dict[Ranks, Store] = {}


def _opened(ranks: Ranks, *, timeout_s: float) -> Store:
    environ = os.environ
    is_of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = environ["MASTER_ADDR"] if is_of_agent else meeting_host(environ)
    # A plain `srun python` meets at a port derived from the job id.
    port = number_in(environ, "MASTER_PORT", default=20000 + number_in(environ, "SLURM_JOB_ID") % 20000)
    try:
        if ranks.rank == 0 and not is_of_agent:
            return hold_store(host, port, size=ranks.size, timeout_s=timeout_s)
        return _connect(host, port, ranks=ranks, timeout_s=timeout_s)
    except (dist.DistError, OSError) as error:
        reason = f"{host}:{port} does not answer within timeouts.load_s={timeout_s:g}"
        if isinstance(error, OSError):
            reason = f"{host}:{port}: {(error.strerror or str(error)).lower()}"
        sentence = f"rank {ranks.rank} cannot reach the others, {reason}; another MASTER_PORT may be free"
        raise LostRankError(sentence, speaks=_may_speak_first(ranks)) from error


def _may_speak_first(ranks: Ranks) -> bool:
    """Whether this rank speaks while ranks do not know of each other."""
    return ranks.rank == 1 or ranks.local_rank == 0


def hold_store(host: str, port: int, *, size: int, timeout_s: float) -> TCPStore:
    """Make a store that others reach at `host`; for port 0 at a free one, which it then names."""
    with listen(host, port) as server:
        port = server.getsockname()[1]
        return _tcp_store(host, port, size=size, timeout_s=timeout_s, listen_fd=server.detach())


def _connect(host: str, port: int, *, ranks: Ranks, timeout_s: float) -> TCPStore:
    """Reach a store, in attempts between which signals are heeded."""
    began, has_said = time.monotonic(), False
    while True:
        try:
            store = _tcp_store(host, port, size=ranks.size, timeout_s=min(timeout_s, _HEED_EVERY_S))
        except dist.DistError:
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                raise
            if waited_s > _QUIET_S and not has_said:
                has_said = True
                _say_awaited("rank 0", ranks, timeout_s=timeout_s, speaks=_may_speak_first(ranks))
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _tcp_store(host: str, port: int, *, size: int, timeout_s: float, listen_fd: int | None = None) -> TCPStore:
    return TCPStore(
        host,
        port,
        size,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


class Seen(NamedTuple):
    """Facts that a rank gives the others.

    Attributes:
        host: of the rank.
        num_ranks: on its node.
        cores: available to it, before ranks share them.
        num_gpus: that it sees; none if the run is for CPUs.
        ids: of these GPUs where they are fewer than the ranks of the node; none if CUDA does not start.
        versions: of `_VERSIONED`.
    """

    host: str
    num_ranks: int
    cores: tuple[int, ...]
    num_gpus: int = 0
    ids: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


_VERSIONED = ("llama_ssp", "torch", "NCCL")


@cache
def seen_by_all(ranks: Ranks, kind: DeviceKind, *, timeout_s: float) -> tuple[Seen, ...]:
    """Return what every rank sees, in order; all must call this together.

    Raises a LostRankError, which the lowest rank that has come reports, if others do not come in time; PlacementError
    if they have other versions.
    """
    num_gpus = 0 if kind is DeviceKind.cpu else torch.cuda.device_count()
    ids = _ids() if 0 < num_gpus < ranks.local_size else ()
    own = Seen(socket.gethostname(), ranks.local_size, _first_cores(), num_gpus, ids, _versions(num_gpus))
    if ranks.size == 1:
        return (own,)
    store = open_store(ranks, timeout_s=timeout_s)
    keys = [f"llama_ssp/seen/{kind.name}/{rank}" for rank in range(ranks.size)]
    store.set(keys[ranks.rank], json.dumps(own))
    wait_for_all(store, keys, ranks=ranks, timeout_s=timeout_s)
    seen = tuple(_read(store.get(key)) for key in keys)
    # Rank 0 may hold the store, and end with an error before the others have read.
    have_read = [f"{key}/read" for key in keys]
    store.set(have_read[ranks.rank], "")
    if ranks.rank == 0:
        wait_for_all(store, have_read, ranks=ranks, timeout_s=timeout_s)
    for rank, other in enumerate(seen):
        for name, first, theirs in zip(_VERSIONED, seen[0].versions, other.versions, strict=False):
            if first != theirs:
                raise PlacementError(
                    f"rank {rank} on {other.host} has {name} {theirs or 'unknown'}, and rank 0 on "
                    f"{seen[0].host} has {first or 'unknown'}: install the same versions on every node"
                )
    return seen


def _versions(num_gpus: int) -> tuple[str, ...]:
    own = ""
    with suppress(PackageNotFoundError):
        own = version("llama_ssp")
    nccl = torch.cuda.nccl.version() if num_gpus and dist.is_nccl_available() else ()
    return own, torch.__version__, ".".join(map(str, nccl))


@cache
def _first_cores() -> tuple[int, ...]:
    """The cores available before the first point of a sweep took its share."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _ids() -> tuple[str, ...]:
    try:
        return tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count()))
    except RuntimeError:
        return ()


def _read(text: bytes) -> Seen:
    host, num_ranks, cores, num_gpus, ids, *more = json.loads(text)
    return Seen(host, num_ranks, tuple(cores), num_gpus, tuple(ids), tuple(more[0]) if more else ())


def wait_for_all(store: Store, keys: Sequence[str], *, ranks: Ranks, timeout_s: float) -> None:
    """Wait until every rank has set its key; the lowest that did reports a LostRankError if others do not in time.

    It says after a while for which ranks it waits.
    """
    began, has_said = time.monotonic(), False
    while True:
        try:
            store.wait(list(keys), timedelta(seconds=min(timeout_s, _HEED_EVERY_S)))
        except dist.DistError as error:
            waited_s, is_there = time.monotonic() - began, isinstance(error, dist.DistStoreError)
            if is_there and waited_s < timeout_s:
                if waited_s > _QUIET_S and not has_said:
                    came, late = _came(store, keys)
                    has_said = True
                    _say_awaited(late, ranks, timeout_s=timeout_s, speaks=ranks.rank == came[0])
                continue
            came, late = _came(store, keys)
            cause = f"within timeouts.load_s={timeout_s:g}" if is_there else "before the store of the ranks had ended"
            raise LostRankError(f"{late} did not connect {cause}", speaks=ranks.rank == came[0]) from error
        return


def _came(store: Store, keys: Sequence[str]) -> tuple[list[int], str]:
    """Return the ranks that have set their keys, and name the others."""
    try:
        came = [rank for rank, key in enumerate(keys) if store.check([key])]
    except dist.DistError:  # the store has ended with rank 0
        came = list(range(1, len(keys)))
    late = [str(rank) for rank in range(len(keys)) if rank not in came]
    return came, f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}"


def _say_awaited(late: str, ranks: Ranks, *, timeout_s: float, speaks: bool) -> None:
    starter = "torchrun has to start them, on every node with the same --nnodes and --master-addr"
    if launcher_of(os.environ) == "srun":
        starter = (
            f"each of the {ranks.size} tasks of this SLURM step has to run this command; in a shell of one of them, "
            f"srun --overlap --ntasks={ranks.size} before it starts all"
        )
    if speaks:
        complain(f"waiting for {late} until timeouts.load_s={timeout_s:g}: {starter}")


def choose_device(kind: DeviceKind, ranks: Ranks, seen: Sequence[Seen]) -> tuple[torch.device, str | None]:
    """Choose this rank's device; `auto` takes GPUs if there is one for every rank.

    Ranks may see different GPUs, so all of them decide alike, from what all see. Returns a sentence for the user too if
    GPUs are left unused. Raises PlacementError if fewer GPUs than requested are there.
    """
    if kind is DeviceKind.cpu:
        return torch.device("cpu"), None
    own = seen[ranks.rank]
    lacking = [rank for rank in seen if not _suffice([other for other in seen if other.host == rank.host])]
    if not lacking:
        return torch.device("cuda", ranks.local_rank if own.num_gpus >= ranks.local_size else 0), None
    fewest = min(lacking, key=lambda rank: rank.num_gpus)
    if kind is DeviceKind.cuda:
        where = "this node" if fewest.host == own.host else f"node {fewest.host}"
        fewer = f"start at most {fewest.num_gpus} ranks, or " if fewest.num_gpus else ""
        raise PlacementError(
            f"device=cuda needs one GPU per rank, and {where} has {fewest.num_gpus} for {fewest.num_ranks}: "
            f"{fewer}use device=cpu"
        )
    note = f"{fewest.num_ranks} ranks on a node with {fewest.num_gpus} GPUs: all ranks run on the CPU"
    return torch.device("cpu"), note if own.num_gpus else None


def note_on_peers(num_gpus: int, can_access: Callable[[int, int], bool]) -> str | None:
    """A sentence if some of a node's GPUs, each of a rank, do not reach each other's memory; None if all do."""
    apart = [pair for pair in combinations(range(num_gpus), 2) if not can_access(*pair)]
    if not apart:
        return None
    pairs = ", ".join(f"{one} and {other}" for one, other in apart[:_MOST_NAMED]) + ", ..." * (len(apart) > _MOST_NAMED)
    return (
        f"GPUs {pairs} do not reach each other's memory: what they exchange goes through the host's, which is slower "
        "than plans say; nvidia-smi topo -p2p r shows why"
    )


def _suffice(node: Sequence[Seen]) -> bool:
    """Whether the ranks of a node see a GPU for each of them, or, as `srun --gpus-per-task=1` binds them, their own.

    A rank's own GPUs are cuda:0 and so on to each rank, and only their ids tell them apart.
    """
    if all(rank.num_gpus >= rank.num_ranks for rank in node):
        return True
    every = list(chain.from_iterable(rank.ids for rank in node))
    return all(rank.ids for rank in node) and len(set(every)) == len(every)


def form_group(ranks: Ranks, *, device: torch.device, timeout_s: float) -> None:
    """Form the group of all ranks, which have seen each other.

    Raises LostRankError if a rank has ended since, and torch's DistError, such as NCCL's, if they do not connect.
    """
    stay_on_loopback()
    backend, own_gpu, store = "gloo", None, open_store(ranks, timeout_s=timeout_s)
    if device.type == "cuda":
        for name, value in _OWN_WATCHDOG.items():
            os.environ.setdefault(name, value)
        backend, own_gpu = "cpu:gloo,cuda:nccl", device
    here = [f"llama_ssp/here/{rank}" for rank in range(ranks.size)]
    store.set(here[ranks.rank], "")
    # A GPU may have ended a rank since: torch would wait for it without answering signals.
    wait_for_all(store, here, ranks=ranks, timeout_s=timeout_s)
    dist.init_process_group(
        backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=own_gpu,
    )
