"""Other machines for a job, the same machine with more ranks, and layers that wait outside of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llama_ssp.config.formats import format_of
from llama_ssp.config.machines import hardware as catalogue
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, Offload, TargetKind
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.layouts import block_sizes, same_kind
from llama_ssp.planning.layerwise import GB
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import PlanSpec

MOST_NODES = 4


@dataclass(frozen=True, kw_only=True)
class Use:
    """A job on a machine, and the settings that lead there."""

    settings: tuple[str, ...]
    job: PlanSpec
    hardware: HardwareConfig


def has_its_own_number(hardware: HardwareConfig) -> bool:
    """Whether a machine has as many GPUs as its entry of the catalogue says, which no setting needs to repeat."""
    return hardware.name in catalogue.names() and catalogue.load(hardware.name).num_gpus == hardware.num_gpus


def more_ranks(job: PlanSpec, hardware: HardwareConfig) -> Iterator[Use]:
    """The job on more GPUs of its node, and on more nodes."""
    if job.target_kind is TargetKind.accelerate:  # one rank has the GPUs of one node already
        return
    used, known = len(job.layout.ranks), hardware.num_gpus
    if hardware.name in catalogue.names() and hardware.device == "cuda":
        known = max(known, catalogue.load(hardware.name).num_gpus)
    if hardware.num_nodes == 1:
        for size in sorted(block_sizes(known // job.num_replicas)):
            if size > used and (larger := same_kind(job, size)):
                num_gpus = size * job.num_replicas
                setting = "placement.target.tp_size" if num_gpus <= hardware.num_gpus else "hardware.num_gpus"
                machine = replace(hardware, num_gpus=max(num_gpus, hardware.num_gpus))
                yield Use(settings=(f"{setting}={num_gpus}",), job=larger, hardware=machine)
    for num_nodes in range(hardware.num_nodes + 1, MOST_NODES + 1) if hardware.network else ():
        if larger := same_kind(job, hardware.num_gpus * num_nodes // job.num_replicas):
            machine = replace(hardware, num_nodes=num_nodes)
            yield Use(settings=(f"hardware.num_nodes={num_nodes}",), job=larger, hardware=machine)


def others(job: PlanSpec, hardware: HardwareConfig) -> Iterator[Use]:
    """The job on one node of every other machine of the catalogue; those with the least memory in all come first."""
    if hardware.device != "cuda" or job.target_kind is not TargetKind.tensor:
        return
    found, is_changed = [], not has_its_own_number(hardware)
    for name in catalogue.names():
        machine = catalogue.load(name)
        if machine.device != "cuda" or machine.gpu == hardware.gpu:
            continue
        for size in block_sizes(machine.num_gpus // job.num_replicas):
            num_gpus = size * job.num_replicas
            if other := same_kind(job, size):
                settings = [f"hardware={name}"]
                settings += [f"hardware.num_gpus={num_gpus}"] if is_changed or num_gpus != machine.num_gpus else []
                settings += ["hardware.num_nodes=1"] if hardware.num_nodes > 1 else []
                smaller = replace(machine, num_gpus=num_gpus)
                found.append(Use(settings=tuple(settings), job=other, hardware=smaller))
    yield from sorted(found, key=lambda use: use.hardware.num_gpus * use.hardware.memory_bytes)


def offloaded(job: PlanSpec, hardware: HardwareConfig) -> Use | None:
    """The target layer-wise on the GPUs of a node, with as many layers outside as must be; None if that is impossible.

    Only unquantized layers can wait: a GPU's in the host's memory, a CPU's on its disk.
    """
    if format_of(job.target.quantization).is_quantized or job.num_replicas > 1 or job.offload is not Offload.none:
        return None
    where = Offload.cpu if job.device == "cuda" else Offload.disk
    placed = replace(
        job, target=replace(job.target, by_library=True), target_kind=TargetKind.accelerate, target_ranks=(0,),
        spare_devices=tuple(range(1, hardware.num_gpus)),
        draft_kind=DraftLayout.one_rank, draft_ranks=(0,) if job.draft else (), cuda_graphs=False, offload=where,
    )  # fmt: skip
    most = _most_gb(placed, hardware)
    try:
        if not fits(replace(placed, max_device_bytes=most * GB), hardware):
            return None
    except PlacementError:
        return None
    settings = ["placement.target.kind=accelerate", f"placement.target.offload={where.name}"]
    settings.append(f"placement.target.max_memory_gb={most}")
    if job.draft and job.draft_kind is not DraftLayout.one_rank:
        settings.append(f"placement.draft.kind={DraftLayout.one_rank.name}")
    return Use(settings=tuple(settings), job=replace(placed, max_device_bytes=most * GB), hardware=hardware)


def _most_gb(job: PlanSpec, hardware: HardwareConfig) -> int:
    """The most GB of weights on each device with which the job fits, by bisection; 0 if it never does."""
    low, high = 0, hardware.rank_bytes // GB
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits_with(job, hardware, middle) else (low, middle - 1)
    return low


def _fits_with(job: PlanSpec, hardware: HardwareConfig, most_gb: int) -> bool:
    """Whether it fits; too little room for the embeddings and the head counts as fitting, so that more is tried."""
    try:
        return fits(replace(job, max_device_bytes=most_gb * GB), hardware)
    except PlacementError:
        return True
