"""Which device a rank computes on: its GPU, if there is one for every rank of the node, else the CPU."""

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import chain

import torch

from llama_ssp.config.schema import DeviceKind
from llama_ssp.distributed.environment import Ranks
from llama_ssp.distributed.rendezvous import open_store
from llama_ssp.errors import PlacementError


def choose_device(
    kind: DeviceKind, ranks: Ranks, *, sees_own: Callable[[], bool] = lambda: False
) -> tuple[torch.device, str | None]:
    """Choose this rank's device; `auto` takes GPUs if there is one for every rank of the node.

    Args:
        kind: as configured.
        ranks: of this process.
        sees_own: whether each rank sees GPUs that no other one sees; only called if there seem to be too few.

    Returns:
        The device, and a sentence for the user if GPUs are left unused.

    Raises:
        PlacementError: fewer GPUs than requested are there.
    """
    num_gpus = torch.cuda.device_count() if kind is not DeviceKind.cpu else 0
    if num_gpus >= ranks.local_size:
        return torch.device("cuda", ranks.local_rank), None
    if num_gpus and sees_own():
        return torch.device("cuda", 0), None
    if kind is DeviceKind.cuda:
        fewer = f"start at most {num_gpus} ranks, or " if num_gpus else ""
        raise PlacementError(
            f"device=cuda needs one GPU per rank, and this node has {num_gpus} for {ranks.local_size}: "
            f"{fewer}use device=cpu"
        )
    note = f"{ranks.local_size} ranks on a node with {num_gpus} GPUs: all ranks run on the CPU" if num_gpus else None
    return torch.device("cpu"), note


@cache
def sees_own_gpu(ranks: Ranks, *, timeout_s: float) -> bool:
    """Whether each rank sees GPUs that no other rank of its node sees, as `srun --gpus-per-task=1` binds them.

    All ranks must call this together. Such GPUs are cuda:0 to each of them, and only their own ids tell them apart.
    """
    store = open_store(ranks, timeout_s=timeout_s)
    keys = [f"llama_ssp/gpus/{rank}" for rank in range(ranks.size)]
    store.set(keys[ranks.rank], json.dumps([f"{socket.gethostname()} {gpu}" for gpu in _ids()]))
    store.wait(keys, timedelta(seconds=timeout_s))
    seen = [json.loads(store.get(key)) for key in keys]
    every = list(chain.from_iterable(seen))
    return all(seen) and len(set(every)) == len(every)


def _ids() -> list[str]:
    """The ids of the GPUs that this rank sees; none if CUDA does not start."""
    try:
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    except RuntimeError:
        return []
