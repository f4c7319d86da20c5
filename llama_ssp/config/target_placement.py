"""Where the target sits, as typed settings; those of the draft and of copies are in `schema`."""

from dataclasses import dataclass
from enum import Enum


class TargetKind(Enum):
    """How the target is laid out.

    Cut over its ranks, by our own tensor parallelism or by DeepSpeed's; or its layers in a row over the devices that
    one rank has to itself, with hooks of accelerate between them.
    """

    tensor = "tensor"
    accelerate = "accelerate"
    deepspeed = "deepspeed"


class Offload(Enum):
    """Where layers in a row wait that no device has room for: in the host's memory, or in the run folder."""

    none = "none"
    cpu = "cpu"
    disk = "disk"


@dataclass(kw_only=True)
class TargetPlacement:
    """Ranks of the target; null means all that an `own_gpu` draft leaves, or the first `tp_size` of them.

    Layers in a row (`kind=accelerate`) have one rank. `offload` says where those go that do not fit into
    `max_memory_gb` (1e9 bytes) of weights on each device.
    """

    kind: TargetKind = TargetKind.tensor
    ranks: list[int] | None = None
    tp_size: int | None = None
    offload: Offload = Offload.none
    max_memory_gb: float | None = None
