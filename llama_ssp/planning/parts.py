"""Computes what each rank holds of each model from the job: weights, cache, and the widths of its activations."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import Any

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.inventory import Inventory
from llama_ssp.architectures.sharding import check_deepspeed, split_blocks
from llama_ssp.architectures.sizes import whole_pages
from llama_ssp.config.formats import format_of
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, TargetKind, WholeParts
from llama_ssp.planning.layerwise import layer_placement_of
from llama_ssp.planning.spec import PlannedModel, PlanSpec, model_bytes
from llama_ssp.planning.weights import DTYPE_BYTES, WeightBytes, shards, shares


@dataclass(frozen=True, kw_only=True)
class Part:
    """One model's part on one rank, or on one device of a layer-wise target.

    `width` is the size of queries, keys and values of a position, `working_bytes` that of the largest unpacked or
    offloaded matrix. `beside_bytes` are needed in addition to the weights while loading.
    """

    weights: WeightBytes
    cache_bytes: int
    num_heads: int
    width: int
    units: int
    working_bytes: int
    beside_bytes: int


def rank_shares(
    model: PlannedModel, *, num_ranks: int, kind: TargetKind, whole: WholeParts = WholeParts.none
) -> tuple[Inventory, ...]:
    """The parameters on each rank, or layer-wise on each device without offload; PlacementError if impossible.

    `whole` is what each rank of our own tensor parallelism holds whole.
    """
    shape = model.shape
    if kind is TargetKind.accelerate:
        return _layer_wise(model, split_blocks(shape.num_hidden_layers, min(num_ranks, shape.num_hidden_layers)))
    if kind is TargetKind.deepspeed:
        check_deepspeed(shape, model.quantization, num_ranks=num_ranks)
        uncut = inventory(shape)
        return tuple(
            replace(share, embeddings=uncut.embeddings, head=uncut.head) for share in shares(shape, num_ranks=num_ranks)
        )
    return shares(shape, num_ranks=num_ranks, quantization=model.quantization, whole=whole)


def _layer_wise(model: PlannedModel, held: tuple[range, ...]) -> tuple[Inventory, ...]:
    whole, last = inventory(model.shape), len(held) - 1
    return tuple(
        whole.of_layers(len(layers), first=device == 0, last=device == last) for device, layers in enumerate(held)
    )


def _layer_wise_parts(job: PlanSpec) -> Iterator[Part]:
    """The parts of a layer-wise target by device; the first also computes the offloaded layers."""
    model, row = job.target, layer_placement_of(job)
    sizes: dict[str, Any] = {"num_rows": job.batch_size, "num_slots": job.num_slots}
    (whole,) = _parts(model, job.device, num_ranks=1, kind=TargetKind.tensor, **sizes)
    layer = inventory(model.shape).layer
    read_bytes = DTYPE_BYTES[model.dtype] * max(matrix.num_elements for matrix in layer) if row.waiting else 0
    for device, held in enumerate(_layer_wise(model, row.held)):
        weights, is_first = model_bytes(held, model, device=job.device), device == 0
        num_layers = len(row.held[device]) + (len(row.waiting) if is_first else 0)
        yield replace(
            whole,
            weights=weights,
            cache_bytes=whole.cache_bytes // model.shape.num_hidden_layers * num_layers,
            working_bytes=max(whole.working_bytes, read_bytes if is_first else 0),
            beside_bytes=weights.beside_bytes,
        )


@lru_cache(maxsize=1024)  # a search asks for each target with every draft
def _parts(
    model: PlannedModel, device: str,
    *,
    num_ranks: int, kind: TargetKind, num_rows: int, num_slots: int, whole: WholeParts = WholeParts.none,
) -> tuple[Part, ...]:  # fmt: skip
    """The parts by rank; equal ones are the same object."""
    shape, size = model.shape, DTYPE_BYTES[model.dtype]
    cuts = shards(shape, num_ranks=num_ranks, quantization=model.quantization, whole=whole)
    # DeepSpeed splits a whole model in each rank's host memory, which on a CPU is the planned memory.
    is_whole_first = kind is TargetKind.deepspeed and device == "cpu"
    whole_bytes = model_bytes(inventory(shape), model, device=device).total_bytes if is_whole_first else 0
    row_slots, storage = num_rows * num_slots, format_of(model.quantization)
    most_unpacked = math.inf if storage.unpacks_matrix else storage.gpu_unpacks if device == "cuda" else 0
    found: dict[tuple[int, int, int, int], Part] = {}  # most ranks have equal parts
    parts = []
    for held, shard in zip(rank_shares(model, num_ranks=num_ranks, kind=kind, whole=whole), cuts, strict=True):
        num_heads, num_kv_heads = len(shard.heads.query_heads), len(shard.heads.kv_heads)
        key = id(held), num_heads, num_kv_heads, len(shard.mlp_units)
        if key not in found:
            weights = model_bytes(held, model, device=device)
            slot_bytes = 2 * num_kv_heads * shape.head_dim * size
            found[key] = Part(
                weights=weights,
                cache_bytes=held.num_layers * slot_bytes * row_slots,
                num_heads=num_heads,
                width=(num_heads + 2 * num_kv_heads) * shape.head_dim,
                units=len(shard.mlp_units),
                working_bytes=size * int(min(max(held.products), most_unpacked)),
                beside_bytes=whole_bytes or weights.beside_bytes,
            )
        parts.append(found[key])
    return tuple(parts)


def _sizes(model: PlannedModel, hardware: HardwareConfig, *, num_rows: int, num_slots: int) -> dict[str, Any]:
    """Rows and slots of a cache, which has whole pages where attention reads rows by their lengths."""
    is_paged = model.reads_by_length(hardware)
    return {"num_rows": num_rows, "num_slots": whole_pages(num_slots) if is_paged else num_slots}


def target_parts(job: PlanSpec, hardware: HardwareConfig) -> dict[int, Part]:
    """The target's part on each of its ranks, or devices if layer-wise."""
    if job.target_kind is TargetKind.accelerate:
        return dict(zip(job.target_devices, _layer_wise_parts(job), strict=True))
    sizes = _sizes(job.target, hardware, num_rows=job.batch_size, num_slots=job.num_slots)
    parts = _parts(job.target, job.device, num_ranks=len(job.target_ranks), kind=job.target_kind, **sizes)
    return dict(zip(job.target_ranks, parts, strict=True))


def draft_parts(job: PlanSpec, hardware: HardwareConfig) -> dict[int, Part]:
    """The draft's part on each of its ranks: a slice, or the whole draft if replicated or on one rank."""
    if job.draft is None:
        return {}
    num_ranks, num_rows = len(job.draft_ranks), job.batch_size
    if job.draft_kind is DraftLayout.replicated:
        num_ranks, num_rows = 1, -(-num_rows // num_ranks)
    sizes = _sizes(job.draft, hardware, num_rows=num_rows, num_slots=job.draft_slots)
    parts = _parts(job.draft, job.device, num_ranks=num_ranks, kind=TargetKind.tensor, whole=job.draft_whole, **sizes)
    return dict(zip(job.draft_ranks, cycle(parts), strict=False))
