"""Which device a rank computes on: its GPU, if there is one for every rank of every node, else the CPU."""

import json
import socket
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from llama_ssp.errors import PlacementError
from llama_ssp.ranks.environment import Ranks
from llama_ssp.ranks.rendezvous import open_store, wait_for_all
from llama_ssp.settings.schema import DeviceKind


class Seen(NamedTuple):
    """The GPUs that a rank sees.

    Attributes:
        host: of the rank.
        num_ranks: on its node.
        num_gpus: that it sees.
        ids: of these GPUs where they are fewer than the ranks of the node; none if CUDA does not start.
    """

    host: str
    num_ranks: int
    num_gpus: int
    ids: tuple[str, ...] = ()


def choose_device(kind: DeviceKind, ranks: Ranks, *, timeout_s: float) -> tuple[torch.device, str | None]:
    """Choose this rank's device; `auto` takes GPUs if there is one for every rank.

    Ranks may see different GPUs, so all of them decide alike, from what all see; all must call this together.

    Args:
        kind: as configured.
        ranks: of this process.
        timeout_s: how long to wait for the other ranks.

    Returns:
        The device, and a sentence for the user if GPUs are left unused.

    Raises:
        PlacementError: fewer GPUs than requested are there.
        LostRankError: a rank does not say in time what it sees.
    """
    if kind is DeviceKind.cpu:
        return torch.device("cpu"), None
    num_gpus = torch.cuda.device_count()
    own = Seen(socket.gethostname(), ranks.local_size, num_gpus, _ids() if 0 < num_gpus < ranks.local_size else ())
    seen: Sequence[Seen] = [own]
    if ranks.size > 1:
        seen = _seen_by_all(own, kind, ranks, timeout_s=timeout_s)
    lacking = [each for each in seen if not _suffice([other for other in seen if other.host == each.host])]
    if not lacking:
        return torch.device("cuda", ranks.local_rank if num_gpus >= ranks.local_size else 0), None
    fewest = min(lacking, key=lambda each: each.num_gpus)
    where = "this node" if fewest.host == own.host else f"node {fewest.host}"
    if kind is DeviceKind.cuda:
        fewer = f"start at most {fewest.num_gpus} ranks, or " if fewest.num_gpus else ""
        raise PlacementError(
            f"device=cuda needs one GPU per rank, and {where} has {fewest.num_gpus} for {fewest.num_ranks}: "
            f"{fewer}use device=cpu"
        )
    note = f"{fewest.num_ranks} ranks on a node with {fewest.num_gpus} GPUs: all ranks run on the CPU"
    return torch.device("cpu"), note if num_gpus else None


def _suffice(node: Sequence[Seen]) -> bool:
    """Whether the ranks of a node see a GPU for each of them, or, as `srun --gpus-per-task=1` binds them, their own.

    A rank's own GPUs are cuda:0 and so on to each rank, and only their ids tell them apart.
    """
    if all(each.num_gpus >= each.num_ranks for each in node):
        return True
    every = list(chain.from_iterable(each.ids for each in node))
    return all(each.ids for each in node) and len(set(every)) == len(every)


@cache
def _seen_by_all(own: Seen, kind: DeviceKind, ranks: Ranks, *, timeout_s: float) -> Sequence[Seen]:
    """Publish what this rank sees, and return what every rank does; its own alone if that settles the choice."""
    # A later job of a sweep has the group's store: a second one could not listen at its port.
    of_group = distributed_c10d._get_default_store() if dist.is_initialized() else None  # has no public name
    store = of_group or open_store(ranks, timeout_s=timeout_s)
    keys = [f"llama_ssp/gpus/{rank}" for rank in range(ranks.size)]
    store.set(keys[ranks.rank], json.dumps(own))
    must_have = kind is DeviceKind.cuda
    if not own.num_gpus and not must_have:
        return [own]
    wait_for_all(store, keys, ranks=ranks, timeout_s=timeout_s)
    seen = [_read(store.get(key)) for key in keys]
    if must_have:  # rank 0 may hold the store, and end with an error before the others have read
        have_read = [f"{key}/read" for key in keys]
        store.set(have_read[ranks.rank], "")
        if ranks.rank == 0:
            wait_for_all(store, have_read, ranks=ranks, timeout_s=timeout_s)
    return seen


def _read(text: bytes) -> Seen:
    host, num_ranks, num_gpus, ids = json.loads(text)
    return Seen(host, num_ranks, num_gpus, tuple(ids))


def _ids() -> tuple[str, ...]:
    """The ids of the GPUs that this rank sees; none if CUDA does not start."""
    try:
        return tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count()))
    except RuntimeError:
        return ()
