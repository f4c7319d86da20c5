"""Layer-wise placement: which device holds which layers, and which layers are offloaded.

Plain arithmetic: the loader places the layers, and the plan counts their bytes.

device 0: embeddings, layers 0-9    device 1: layers 10-19    last device: layers 20-27, norm, head
waiting:  layers 28-31, offloaded; every forward reads them into device 0
"""

from dataclasses import dataclass
from itertools import pairwise

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.sharding import split_blocks
from llama_ssp.config.formats import format_of
from llama_ssp.config.schema import Offload
from llama_ssp.errors import PlacementError
from llama_ssp.planning.spec import PlanSpec, model_bytes

GB = 10**9
READ_BYTES_PER_S = {Offload.cpu: 12e9, Offload.disk: 2e9}
"""Estimates for pageable host memory over PCIe 4 x16 and for an NVMe disk, not of the planned machine."""


@dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """Layers held by each device, and the waiting (offloaded) layers, which the first device computes."""

    held: tuple[range, ...]
    waiting: range


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of each layer, of what comes before the first, and of what follows the last."""

    layer: int
    before: int
    after: int


def split_row(num_layers: int, sizes: RowBytes, *, num_devices: int, max_bytes: int | None) -> LayerPlacement:
    """Split layers evenly; if a device lacks room, fill each device and offload the rest.

    Each device may have `max_bytes` of weights, without limit if None. If embeddings or head do not fit on a device,
    PlacementError is raised.
    """
    used = min(num_devices, num_layers)
    held = split_blocks(num_layers, used) + (range(num_layers, num_layers),) * (num_devices - used)
    if max_bytes is None:
        return LayerPlacement(held=held, waiting=range(num_layers, num_layers))
    fixed = [0] * num_devices
    fixed[0] += sizes.before
    fixed[-1] += sizes.after
    if max(fixed) > max_bytes:
        raise PlacementError(
            f"placement.target.max_memory_gb={max_bytes / GB:g} has no room for the embeddings and the head, which are "
            f"never offloaded: give at least {max(fixed) / GB:.4g}"
        )
    room = [(max_bytes - part) // sizes.layer for part in fixed]
    if any(len(part) > most for part, most in zip(held, room, strict=True)):
        edges = [min(sum(room[:count]), num_layers) for count in range(num_devices + 1)]
        held = tuple(range(start, stop) for start, stop in pairwise(edges))
    return LayerPlacement(held=held, waiting=range(held[-1].stop, num_layers))


def check_offload(offload: Offload, *, quantization: str, device: str) -> None:
    """Raise PlacementError for quantized layers, and for a CPU that would offload to its own memory."""
    if offload is Offload.none:
        return
    if format_of(quantization).is_quantized:
        raise PlacementError(
            f"placement.target.offload={offload.name} supports only unquantized layers, and model.quantization="
            f"{quantization} was given: use model.quantization=none, or no offload"
        )
    if offload is Offload.cpu and device == "cpu":
        message = "placement.target.offload=cpu has no effect where the model is on the CPU: use offload=disk or none"
        raise PlacementError(message)


def layer_placement_of(job: PlanSpec) -> LayerPlacement:
    """The layer-wise placement of a job's target; raises as `split_row` and `check_offload`."""
    check_offload(job.offload, quantization=job.target.quantization, device=job.device)
    sizes, num_devices = row_bytes(job), len(job.target_devices)
    return split_row(job.target.shape.num_hidden_layers, sizes, num_devices=num_devices, max_bytes=job.max_device_bytes)


def row_bytes(job: PlanSpec) -> RowBytes:
    """Bytes of a job's target in its precision; on several devices the last one has its own tied embedding."""
    whole, alone = inventory(job.target.shape), len(job.target_devices) == 1

    def size(num_layers: int, *, first: bool, last: bool) -> int:
        held = whole.of_layers(num_layers, first=first, last=last)
        return model_bytes(held, job.target, device=job.device).total_bytes

    before = size(0, first=True, last=False)
    after = size(0, first=True, last=True) - before if alone else size(0, first=False, last=True)
    return RowBytes(layer=size(1, first=False, last=False), before=before, after=after)


def waiting_bytes(job: PlanSpec) -> int:
    """Bytes of offloaded layers, which every forward reads."""
    return 0 if job.offload is Offload.none else len(layer_placement_of(job).waiting) * row_bytes(job).layer
