"""Placement of the target as typed settings; `schema` has those of the draft and of replicas."""

from dataclasses import dataclass
from enum import Enum


class TargetKind(Enum):
    """How the target is split.

    Tensor parallelism over its ranks, our own or DeepSpeed's; or layer-wise over the devices of one rank, with
    accelerate's hooks.
    """

    tensor = "tensor"
    accelerate = "accelerate"
    deepspeed = "deepspeed"


class Offload(Enum):
    """Where layer-wise placement keeps layers that fit on no device: in host memory, or in the run folder."""

    none = "none"
    cpu = "cpu"
    disk = "disk"


@dataclass(kw_only=True)
class TargetPlacement:
    """Ranks of the target; null means all that an `own_gpu` draft leaves, or the first `tp_size` of them.

    Layer-wise placement (`kind=accelerate`) has one rank. `offload` is for layers beyond `max_memory_gb` (1e9 bytes) of
    weights on each device.
    """

    kind: TargetKind = TargetKind.tensor
    ranks: list[int] | None = None
    tp_size: int | None = None
    offload: Offload = Offload.none
    max_memory_gb: float | None = None
