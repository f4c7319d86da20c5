"""Computes the bytes that each rank needs, item by item, from a spec and a machine.

Weights and caches are exact: the loader places slices and layers by the same arithmetic. Activations, logits and graphs
follow the peak of what the loop keeps alive. Device context, communication buffers and graph nodes are figures of the
machine, or the estimates below.

Shapes: B sequences, T positions, W = K + 1 positions of a round, V vocabulary, E hidden size, I MLP units, D head dim.

Layer-wise placement, which the loader does by `split_layers` too:

    device 0: embeddings, layers 0-9    device 1: layers 10-19    last device: layers 20-27, norm, head
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, cycle
from typing import Any

from llama_ssp.architectures import engine
from llama_ssp.architectures.family import check_deepspeed, check_ranks, inventory, kept_whole, record_of
from llama_ssp.architectures.matrices import (
    FUSED,
    Cut,
    Inventory,
    Matrix,
    RankShard,
    WholeParts,
    check_inputs,
    split_blocks,
    split_model,
    vocabulary_parts,
)
from llama_ssp.catalogue import Dtype, ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.spec import DTYPE_BYTES, PlannedModel, PlanSpec
from llama_ssp.settings.rules import rule_of
from llama_ssp.settings.schema import ADAPTIVE_LENGTHS, TargetKind
from llama_ssp.storage.formats import NO_QUANTIZATION, ORDER_BYTES, PackedLayout, StorageFormat, format_of

HALF_BLOCK = 512
COMPILED_BLOCK = 16


def shares(
    shape: ModelShape, *, num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none
) -> tuple[Inventory, ...]:
    """The parameters of each rank of a tensor-parallel group; an impossible split is refused."""
    return _split(tuple(vars(shape).items()), num_ranks=num_ranks, quantization=quantization, whole=whole)[1]


@lru_cache(maxsize=512)  # a search asks for the same shares hundreds of times
def _split(
    sizes: tuple[tuple[str, Any], ...], *, num_ranks: int, quantization: str, whole: WholeParts
) -> tuple[tuple[RankShard, ...], tuple[Inventory, ...]]:
    """The slices of each rank of a model with these sizes, and its parameters; equal ones are the same object."""
    shape = ModelShape(**dict(sizes))
    whole = kept_whole(shape, whole)
    shards = split_model(shape, num_ranks=num_ranks, quantization=quantization, whole=whole)
    if num_ranks == 1:
        return shards, (inventory(shape),)
    kept = inventory(shape).keeping(whole)
    found: dict[Inventory, Inventory] = {}
    held = (kept.of_rank(shard) for shard in shards)
    return shards, tuple(found.setdefault(share, share) for share in held)


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of an inventory.

    Attributes:
        sharded_bytes: matrices, biases and scales of which every rank holds a different part.
        repeated_bytes: norms, unsharded tables, and the biases and row scales of row-parallel matrices, on every rank.
        temporary_bytes: temporary bytes of the loader at its peak, beyond all parts that stay.
    """

    sharded_bytes: int = 0
    repeated_bytes: int = 0
    temporary_bytes: int = 0

    @cached_property
    def total_bytes(self) -> int:
        """Sum of the parts that stay."""
        return self.sharded_bytes + self.repeated_bytes


@lru_cache(maxsize=2048)
def weight_bytes(
    held: Inventory,
    *,
    dtype: Dtype,
    quantization: str,
    matrix_dtype: Dtype | None = None,
    kept_shares: tuple[tuple[str, float], ...] = (),
    layout: PackedLayout | None = None,
    fuses: bool = False,
) -> WeightBytes:
    """Count the bytes of a rank's parameters.

    `matrix_dtype` is the number format of the linear layers, if different; a tied head is then a copy. `quantization`
    applies to the matrices of layers; `kept_shares` has, by module, the share of layers in which it stays unquantized.
    `layout` is that of files that are kept as they are. A layout with scattered groups stores an order of the inputs
    for each product. If the model `fuses`, matrices with the same input form one product. Embeddings, norms, biases and
    heads stay in the model's number format.
    """
    storage, size = format_of(quantization), DTYPE_BYTES[dtype]
    matrix_size = DTYPE_BYTES[matrix_dtype or dtype]
    kept = _in_blocks if matrix_size != size else lambda matrix: matrix
    layer_kept = (lambda matrix: matrix) if storage.is_quantized else kept
    sharded = repeated = 0
    products = dict[str, list[tuple[int, int]]]()
    for matrix in held.layer:
        product = FUSED.get(matrix.module, matrix.module) if fuses else matrix.module
        in_group = (layout.group if layout else storage.group_of(matrix.num_columns)) or matrix.num_columns
        stored = storage.matrix_bytes(
            layer_kept(matrix).num_elements, matrix_size, group=in_group if storage.groups else 0
        )
        if layout and layout.is_scattered:
            columns = matrix.num_columns
            if columns < matrix.whole_columns:
                columns = layout.num_with_gaps(columns, of=matrix.whole_columns)
                elements = replace(matrix, num_columns=columns).num_elements
                stored = storage.matrix_bytes(elements, matrix_size, group=storage.least_group)
            stored += 0 if product in products else round(ORDER_BYTES * matrix.copies * columns)
        row_scales = round(storage.row_bytes * matrix.num_rows * matrix.copies)
        if share := dict(kept_shares).get(matrix.module):
            unquantized = matrix_size * kept(matrix).num_elements
            stored, row_scales = round(share * unquantized + (1 - share) * stored), round((1 - share) * row_scales)
        bias = size * matrix.num_rows if matrix.has_bias else 0
        if matrix.cut is None:
            repeated += stored + row_scales + bias
        elif matrix.cut == 0:
            sharded += stored + row_scales + bias
        else:
            sharded, repeated = sharded + stored, repeated + row_scales + bias
        products.setdefault(product, []).append((stored if layout else size * matrix.num_elements, stored + row_scales))
    tables = [(matrix, size, size * matrix.num_elements) for matrix in held.embeddings]
    if held.head or (held.embeddings and matrix_size != size):
        output = kept(held.output)
        tables.append((output, matrix_size, matrix_size * output.num_elements))
    table_bytes = {True: 0, False: 0}
    for matrix, value_bytes, stored in tables:
        table_bytes[matrix.cut is None] += stored + (value_bytes * matrix.num_rows if matrix.has_bias else 0)
    temporary = _temporary_bytes([*products.values()], storage, is_half=matrix_size != size)
    if matrix_size != size and tables:  # the head, which library modules load last, and the lean decoder first
        without = held.num_layers * (sharded + repeated) if fuses else 0
        read = size * held.output.num_elements if held.head else 0
        temporary = max(temporary, read + tables[-1][2] - without)
    return WeightBytes(
        sharded_bytes=held.num_layers * sharded + table_bytes[False],
        repeated_bytes=held.num_layers * (repeated + size * held.layer_vectors)
        + size * held.final_vectors
        + table_bytes[True],
        temporary_bytes=temporary,
    )


def _temporary_bytes(products: Sequence[Sequence[tuple[int, int]]], storage: StorageFormat, *, is_half: bool) -> int:
    """Temporary bytes of the loader, at the largest product of the last layer; each is made before the next is read.

    Products are lists of matrices: the bytes that are read, and those that stay. The loader joins the matrices of a
    product and frees them one by one. Quantizing and halving make copies. GPUs, where nothing is halved, read two
    matrices ahead.
    """
    temporary = 0
    for place, product in enumerate(products):
        later = [*chain.from_iterable(products[place + 1 :])]
        read, stored = map(sum, zip(*product, strict=True))
        copies = product[-1][0] if len(product) > 1 else 0
        if storage.is_quantized or is_half:
            copies = max(copies, storage.loading_copies * stored)
        ahead = 0 if is_half else sum(size for size, _ in later[:2])
        temporary = max(temporary, read + copies + ahead - stored - sum(size for _, size in later))
    return temporary


def _in_blocks(matrix: Matrix) -> Matrix:
    """A matrix in 16 bits: as it is for the compiled kernel, with the inputs padded to whole blocks for FBGEMM's."""
    if matrix.num_rows % COMPILED_BLOCK == matrix.num_columns % COMPILED_BLOCK == 0:
        return matrix
    return replace(matrix, num_columns=HALF_BLOCK * -(-matrix.num_columns // HALF_BLOCK))


def model_bytes(held: Inventory, model: PlannedModel, *, device: str) -> WeightBytes:
    """Bytes of a rank's parameters of a model, as stored on `device`."""
    return weight_bytes(
        held, dtype=model.dtype, quantization=model.quantization, matrix_dtype=model.matrix_dtype(device),
        kept_shares=model.kept_shares, layout=model.layout, fuses=model.is_lean,
    )  # fmt: skip


def step_bytes(held: Inventory, model: PlannedModel, *, device: str) -> int:
    """Bytes of a rank's weights that one forward reads; an embedding counts only if it is also the head."""
    is_head = held.head is None and model.matrix_dtype(device) is model.dtype
    tables = 0 if is_head else sum(table.num_elements for table in held.embeddings)
    read = replace(held, layer=tuple(replace(matrix, copies=matrix.num_used(1)) for matrix in held.layer))
    return (
        model_bytes(read if held.experts else held, model, device=device).total_bytes
        - DTYPE_BYTES[model.dtype] * tables
    )


GB, GIB = 10**9, 2**30


def split_layers(num_layers: int, *, num_devices: int) -> tuple[range, ...]:
    """Split the layers of a layer-wise target evenly; devices beyond the layers have none."""
    used = min(num_devices, num_layers)
    return split_blocks(num_layers, used) + (range(num_layers, num_layers),) * (num_devices - used)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One model's part on one rank, or on one device of a layer-wise target; by default none.

    A slot of its cache has `slot_bytes / of_layers`, and a row `row_bytes / of_layers` more. `width` is the size of
    queries, keys and values of a position, `working_bytes` that of the largest unpacked matrix. `temporary_bytes` are
    needed in addition to the weights while loading.
    """

    weights: WeightBytes = WeightBytes()
    slot_bytes: int = 0
    row_bytes: int = 0
    of_layers: int = 1
    num_heads: int = 0
    width: int = 0
    units: int = 0
    working_bytes: int = 0
    temporary_bytes: int = 0

    def cache_bytes(self, num_slots: int, num_rows: int) -> int:
        """Bytes of its cache with so many slots of all rows."""
        return (num_slots * self.slot_bytes + num_rows * self.row_bytes) // self.of_layers


_NOTHING = _Part()


def rank_shares(
    model: PlannedModel, *, num_ranks: int, kind: TargetKind, whole: WholeParts = WholeParts.none
) -> tuple[Inventory, ...]:
    """The parameters on each rank, or layer-wise on each device; PlacementError if impossible.

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
    check_ranks(shape.model_type, num_ranks)
    held = shares(shape, num_ranks=num_ranks, quantization=model.quantization, whole=whole)
    _check_groups(model, held)
    return held


def _check_groups(model: PlannedModel, held: tuple[Inventory, ...]) -> None:
    """Raise PlacementError if the inputs of a matrix on some rank do not fill the groups of the storage format.

    Of families without a record, whose matrices a plan does not know, runs alone find that.
    """
    storage, layout, kept = format_of(model.quantization), model.layout, dict(model.kept_shares)
    group = layout.slice_group if layout and layout.slice_group else storage.least_group
    is_known = record_of(model.shape.model_type).is_written
    for matrices in zip(*(share.layer for share in held), strict=True) if is_known else ():
        widths = {matrix.num_columns for matrix in matrices if kept.get(matrix.module) != 1}
        check_inputs(
            storage.name, matrices[0].module, widths, group=group, is_cut=len(held) > 1 and matrices[0].cut == 1,
            num_ranks=len(held), is_stored=layout is not None,
        )  # fmt: skip


def _layer_wise(model: PlannedModel, held: tuple[range, ...]) -> tuple[Inventory, ...]:
    whole, last = inventory(model.shape), len(held) - 1
    return tuple(
        whole.of_layers(len(layers), first=device == 0, last=device == last) for device, layers in enumerate(held)
    )


@lru_cache(maxsize=1024)  # a search asks for each target with every draft, and a plan with every batch and context
def _parts(
    model: PlannedModel, device: str, *, num_ranks: int, kind: TargetKind, whole: WholeParts = WholeParts.none,
    num_shared: int = 0, num_kept: tuple[int, ...] = (),
) -> tuple[_Part, ...]:  # fmt: skip
    """The parts by rank, without tables that are shared; for `num_kept` see `PlanSpec.kept_states`."""
    shape, size, storage = model.shape, DTYPE_BYTES[model.dtype], format_of(model.quantization)
    sizes = tuple(vars(shape).items())
    shards, _ = _split(sizes, num_ranks=num_ranks, quantization=model.quantization, whole=whole)
    # DeepSpeed splits a whole model in each rank's host memory, which on a CPU is the planned memory.
    is_whole_first = kind is TargetKind.deepspeed and device == "cpu"
    whole_bytes = model_bytes(inventory(shape), model, device=device).total_bytes if is_whole_first else 0
    most_unpacked = math.inf if storage.unpacks_matrix else storage.gpu_unpacks if device == "cuda" else 0
    parts = []
    for held, shard in zip(rank_shares(model, num_ranks=num_ranks, kind=kind, whole=whole), shards, strict=True):
        num_heads, num_kv_heads = len(shard.heads.query_heads), len(shard.heads.kv_heads)
        weights = model_bytes(held.without_tables(num_shared), model, device=device)
        part = _Part(
            weights=weights,
            slot_bytes=model.slot_bytes(num_kv_heads) * held.num_layers,
            row_bytes=model.state_bytes(*num_kept, held=held) * held.num_layers,
            of_layers=shape.num_hidden_layers,
            num_heads=num_heads,
            width=(num_heads + 2 * num_kv_heads) * shape.head_dim,
            units=shard.num_features(Cut.mlp_units, shape.intermediate_size),
            working_bytes=size * int(min(max(held.products), most_unpacked)),
            temporary_bytes=whole_bytes or weights.temporary_bytes,
        )
        parts.append(part)
    return tuple(parts)


def _target_parts(spec: PlanSpec) -> dict[int, _Part]:
    """The target's part on each of its ranks, or devices if layer-wise."""
    model = spec.target
    if spec.target_kind is not TargetKind.accelerate:
        parts = _parts(
            model, spec.device, num_ranks=len(spec.target_ranks), kind=spec.target_kind, num_kept=spec.kept_states[0]
        )
        return dict(zip(spec.target_ranks, parts, strict=True))
    (whole,) = _parts(model, spec.device, num_ranks=1, kind=TargetKind.tensor)
    split, found = split_layers(model.shape.num_hidden_layers, num_devices=len(spec.target_devices)), {}
    for device, layers, held in zip(spec.target_devices, split, _layer_wise(model, split), strict=True):
        weights, slot_bytes = model_bytes(held, model, device=spec.device), kv_bytes_per_token(model) * len(layers)
        row_bytes = model.state_bytes(*spec.kept_states[0]) * len(layers)
        found[device] = replace(
            whole, weights=weights, temporary_bytes=weights.temporary_bytes, slot_bytes=slot_bytes, row_bytes=row_bytes
        )
    return found


def _draft_parts(spec: PlanSpec) -> dict[int, _Part]:
    """The draft's part on each of its ranks: a slice, or the whole draft if replicated or on one rank."""
    if spec.draft is None:
        return {}
    parts = _parts(
        spec.draft, spec.device, num_ranks=1 if spec.layout.splits_batch else len(spec.draft_ranks),
        kind=TargetKind.tensor, whole=spec.draft_whole, num_shared=spec.num_shared_tables,
        num_kept=spec.kept_states[1],
    )  # fmt: skip
    return dict(zip(spec.draft_ranks, cycle(parts), strict=False))


GRAPH_NODE_BYTES = 32 * 1024
"""Memory of one kernel in a captured graph, estimated from logs of serving engines (0.3-1 GiB for 67 graphs)."""
NCCL_NODES = 4
"""Nodes of a layer's two sums by NCCL: each is a kernel, and an event that NCCL records, as an H100 has shown."""
TIGHT_SHARE = 0.03
"""A rank with a smaller share of its memory left is called tight."""
SLACK_SHARE = 0.01
"""Fragmentation of the caching allocator, as a share of what it serves: 0.4 to 1.3 % on an H200."""


@dataclass(frozen=True, kw_only=True)
class RankMemoryPlan:
    """Bytes needed on one rank at the same time, and its capacity.

    The `repeated_bytes` are the part of the weights that every rank of the model holds whole: norms, row scales,
    unsharded tables.
    """

    rank: int
    target_weights_bytes: int
    draft_weights_bytes: int
    target_cache_bytes: int
    draft_cache_bytes: int
    logits_bytes: int
    activations_bytes: int
    graphs_bytes: int
    collectives_bytes: int
    context_bytes: int
    slack_bytes: int
    total_bytes: int
    loading_peak_bytes: int
    capacity_bytes: int
    target_repeated_bytes: int
    draft_repeated_bytes: int
    target_heads: int

    @property
    def needed_bytes(self) -> int:
        """The larger of the peaks while loading and while running."""
        return max(self.total_bytes, self.loading_peak_bytes)

    @property
    def free_bytes(self) -> int:
        """Remaining bytes; negative if the plan does not fit."""
        return self.capacity_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether this rank has enough memory."""
        return self.free_bytes >= 0

    @property
    def room(self) -> str:
        """The needed and the available bytes in words."""
        return f"{self.needed_bytes / GIB:.1f} of {self.capacity_bytes / GIB:.1f} GiB"

    @property
    def is_tight(self) -> bool:
        """Whether it fits with little left."""
        return 0 <= self.free_bytes < TIGHT_SHARE * self.capacity_bytes


def memory(spec: PlanSpec, hardware: HardwareConfig) -> tuple[RankMemoryPlan, ...]:
    """The bytes of every rank, replica after replica; PlacementError if a model cannot be laid out as requested.

    GPUs that hold layers but have no rank count as ranks.
    """
    by_rank = sorted((rank, plan) for plan, ranks in _equal_ranks(spec, hardware) for rank in ranks)
    first = range(0, spec.num_replicas * len(by_rank), len(by_rank))
    return tuple(replace(plan, rank=start + rank) for start in first for rank, plan in by_rank)


def fullest_rank(spec: PlanSpec, hardware: HardwareConfig) -> RankMemoryPlan:
    """The rank that has the least memory left, of a replica; raises as `memory`."""
    return min((plan for plan, _ in _equal_ranks(spec, hardware)), key=lambda plan: plan.free_bytes)


@lru_cache(maxsize=256)  # a search asks more than once
def _equal_ranks(spec: PlanSpec, hardware: HardwareConfig) -> tuple[tuple[RankMemoryPlan, list[int]], ...]:
    """The bytes of ranks of a replica that need the same, as those of the first one, with all of these ranks."""
    targets, drafts = _target_parts(spec), _draft_parts(spec)
    found: dict[tuple[object, ...], tuple[RankMemoryPlan, list[int]]] = {}
    for rank in sorted({*targets, *drafts}):
        target, draft = targets.get(rank, _NOTHING), drafts.get(rank, _NOTHING)
        has_more_logits = rank in (spec.layout.verify_rank, spec.target_devices[-1])
        key = target, draft, rank if has_more_logits else None
        if key not in found:
            found[key] = _rank_memory(spec, hardware, rank, target, draft), []
        found[key][1].append(rank)
    return tuple(found.values())


def _rank_memory(spec: PlanSpec, hardware: HardwareConfig, rank: int, target: _Part, draft: _Part) -> RankMemoryPlan:
    num_slots = spec.batch_size * spec.num_slots
    taps_bytes = num_slots * spec.tap_bytes  # where a head reads them, or they are sent from
    uniforms = 3 * spec.num_draft_tokens * spec.drafts + 4
    # All that the rows can need, in fp64, twice while all rows are admitted at once.
    uniforms_bytes = 2 * 8 * spec.batch_size * (spec.max_new_tokens + 1) * uniforms
    served = {
        "target_weights_bytes": target.weights.total_bytes,
        "draft_weights_bytes": draft.weights.total_bytes,
        "target_cache_bytes": target.cache_bytes(num_slots, spec.batch_size),
        "draft_cache_bytes": draft.cache_bytes(spec.draft_rows * spec.draft_slots, spec.draft_rows)
        + taps_bytes * (rank in spec.draft_ranks or spec.sends_taps)
        + spec.copies_bytes,
        "logits_bytes": _logits_bytes(spec, rank) + uniforms_bytes,
        "activations_bytes": max(
            _activation_bytes(spec, hardware, model, part)
            for model, part in ((spec.target, target), (spec.draft, draft))
        ),
    }
    held = [model for model, part in ((spec.target, target), (spec.draft, draft)) if model and part is not _NOTHING]
    packages = [format_of(model.quantization).package_bytes for model in held if hardware.device == "cpu"]
    context_bytes = hardware.context_bytes + max(packages, default=0)
    fixed = {
        "graphs_bytes": _graph_bytes(spec, hardware, drafts=draft is not _NOTHING) if spec.cuda_graphs else 0,
        "collectives_bytes": hardware.collective_bytes * _num_communicators(spec, rank),
        "context_bytes": context_bytes,
        "slack_bytes": int(SLACK_SHARE * sum(served.values())) if hardware.device == "cuda" else 0,
    }
    loading = target.weights.total_bytes + max(
        target.temporary_bytes, draft.weights.total_bytes + draft.temporary_bytes
    )
    return RankMemoryPlan(
        rank=rank,
        **served,
        **fixed,
        total_bytes=sum(served.values()) + sum(fixed.values()),
        loading_peak_bytes=loading + context_bytes + fixed["collectives_bytes"],
        capacity_bytes=hardware.rank_bytes,
        target_repeated_bytes=target.weights.repeated_bytes,
        draft_repeated_bytes=draft.weights.repeated_bytes,
        target_heads=target.num_heads,
    )


def _num_communicators(spec: PlanSpec, rank: int) -> int:
    """The groups of several ranks that this one belongs to: of all replicas, of its own, of each model.

    NCCL keeps buffers for each from the beginning; equal groups are one.
    """
    groups = {spec.layout.ranks, tuple(spec.target_ranks), tuple(spec.draft_ranks)}
    of_replicas = spec.num_replicas > 1
    return of_replicas + sum(len(group) > 1 and rank in group for group in groups)


def _logits_bytes(spec: PlanSpec, rank: int) -> int:
    """Bytes of vocabulary-sized tensors of a round on this rank.

    Ranks of the target have logits (gathered, then in fp32), or parts of them, and run the rule on these. A rank that
    runs the rule has the target's and the draft's probabilities in fp32, one more copy if the rule keeps all rows, and
    one fp64 cumulative sum per row to draw from. Penalties and races need more; the former count all tokens. Other
    ranks of the draft have its probabilities.
    """
    layout, positions = spec.layout, max(spec.round_positions, spec.scored_positions)
    size, vocabulary, num_draft_tokens = DTYPE_BYTES[spec.target.dtype], spec.target.shape.vocab_size, positions - 1
    num_copies, num_elsewhere = 2 * (len(spec.target_ranks) > 1), 0
    if is_over_shards := spec.draws_over_shards[0] and not spec.scores_texts:
        num_copies, own = 1, len(vocabulary_parts(vocabulary, len(spec.target_ranks))[0])
        vocabulary, num_elsewhere = own, vocabulary - own
    logits = positions * (num_copies * size + 4) if rank in spec.target_ranks else 0
    logits += positions * size * (rank == spec.target_devices[-1] and rank not in spec.target_ranks)
    drafts = rank in spec.draft_ranks
    num_own = spec.draft_rows if drafts or not layout.splits_batch else 0
    decides = drafts if layout.splits_batch else rank == layout.verify_rank
    decides = decides or (is_over_shards and rank in spec.target_ranks)
    whole = 4 * positions * rule_of(spec.rule).keeps_all_rows
    rule = 4 * positions + 4 * num_draft_tokens + whole + 8 if decides else 4 * num_draft_tokens * drafts
    if drafts and spec.own_tokenizer:
        rule += 8  # the draft's logits with one more column, and what is moved to the target's ids
    if decides and spec.tree and not spec.is_certain:  # what is left of both models' rows at the nodes of a level
        rule += 4 * 3 * max(1, *spec.tree.read)
    if decides and spec.overlaps:  # of what is in flight, while those of the next block arrive
        rule += 4 * positions
    if decides:  # counts, penalized logits and a mask; the bits of a race and what is made of them
        rule += positions * (9 * spec.counts_tokens + 16 * rule_of(spec.rule).draws_by_position)
    counted = 4 * spec.batch_size * positions * num_elsewhere * spec.counts_tokens
    return vocabulary * (spec.batch_size * logits + num_own * rule) + counted


def _activation_bytes(spec: PlanSpec, hardware: HardwareConfig, model: PlannedModel | None, part: _Part) -> int:
    """Peak of a prefill chunk: the residual and its norm, attention or the MLP, and masks where it needs them.

    If the attention of a round or of short prompts splits a sequence into parts, each part has its own sums in fp32.
    With masks the lean decoder copies queries and attended values, and needs a line of the mask for each query of a
    group. The library's modules repeat keys and values for each head of a group. A cache format that attention cannot
    read is unpacked layer by layer, keys and values in turn, through fp32. Of the states behind the tokens of a round,
    three copies of a layer's are made at once.
    """
    if model is None or part is _NOTHING:
        return 0
    shape, size = model.shape, DTYPE_BYTES[model.dtype]
    positions = min(engine.PREFILL_CHUNK, spec.prompt_tokens)
    bucket = bucket_of(spec.prompt_tokens, spec.num_slots, hardware)
    record, heads_width = record_of(shape.model_type), part.num_heads * shape.head_dim
    group, attended, masks, repeated = shape.num_attention_heads // shape.num_key_value_heads, 2 * part.width, 0, 0
    parts_bytes = 0
    if model.reads_by_length(hardware):
        padded = -(-engine.short_size(spec.batch_size * spec.prompt_tokens) // spec.batch_size)
        positions = max(positions, padded)
        num_kv_heads = (part.width - heads_width) // (2 * shape.head_dim)
        num_parts = min(engine.most_parts(num_kv_heads), -(-spec.num_slots // engine.PART_SLOTS))
        parts_bytes = 4 * max(spec.round_positions, padded) * num_parts * part.num_heads * (shape.head_dim + 1)
    else:
        masks = positions * bucket * record.attention_pair_bytes(num_heads=part.num_heads, value_bytes=size)
        if model.is_lean and hardware.device == "cuda":
            masks, attended = masks * group, max(attended, part.width + 3 * heads_width)
        elif not model.is_lean and group > 1 and not record.keeps_scores:
            repeated = 2 * bucket * heads_width * size
    if model.unpacks_cache(hardware) or (spec.tree and model.has_own_cache):
        read = spec.num_slots if model.reads_by_length(hardware) else bucket
        repeated += read * (part.width - heads_width) * (size + 2)
    largest = max((kept.num_values for kept in inventory(shape).states), default=0)
    states_bytes = 3 * engine.STATE_VALUE_BYTES * spec.round_positions * largest
    wide = max(positions * attended * size + repeated, positions * 3 * part.units * size, parts_bytes, states_bytes)
    return spec.batch_size * (positions * 3 * shape.hidden_size * size + wide + masks) + part.working_bytes


def _graph_bytes(spec: PlanSpec, hardware: HardwareConfig, *, drafts: bool) -> int:
    """Captured graphs: the target's plain and round forwards, all K draft steps, and forwards of short prompts.

    They serve all lengths where every model reads its cache by lengths; with masks there are some for each bucket.
    """
    by_length = all(model.reads_by_length(hardware) for model in (spec.target, spec.draft) if model)
    num_buckets = 1 if by_length else -(-spec.num_slots // engine.BUCKET_STEP[hardware.device])
    lengths = ADAPTIVE_LENGTHS if spec.adapts else (spec.num_draft_tokens,)
    num_short = len(engine.SHORT_PROMPTS) * (by_length and spec.prompt_tokens <= engine.SHORT_PROMPTS[-1])

    def num_nodes(model: PlannedModel, ranks: tuple[int, ...]) -> int:
        has_nccl = len(ranks) > 1 and not spec.takes_own_sums(hardware, ranks)
        return model.shape.num_hidden_layers * (spec.kernels.layer + has_nccl * NCCL_NODES)

    nodes = (1 + len(lengths) * spec.drafts + num_short) * num_nodes(spec.target, spec.target_ranks)
    if spec.draft and drafts:
        ranks = spec.draft_ranks[:1] if spec.layout.splits_batch else spec.draft_ranks
        num_forwards = len(lengths) if spec.drafts_in_one_pass else sum(lengths)
        nodes += (num_forwards + num_short * (not spec.has_head)) * num_nodes(spec.draft, ranks)
    return num_buckets * nodes * GRAPH_NODE_BYTES


def bucket_of(num_tokens: int, num_slots: int, hardware: HardwareConfig) -> int:
    """Cache slots that a forward reads if `num_tokens` of a row are filled."""
    step = engine.BUCKET_STEP[hardware.device]
    return min(-(-num_tokens // step) * step, num_slots)


def kv_bytes_per_token(model: PlannedModel) -> int:
    """Keys and values of one token in all layers, over all ranks."""
    return model.slot_bytes(model.shape.num_key_value_heads)


def fits(spec: PlanSpec, hardware: HardwareConfig) -> bool:
    """Whether the spec can be laid out, and every rank has enough memory."""
    try:
        return fullest_rank(spec, hardware).fits
    except PlacementError:
        return False


def largest_batch(spec: PlanSpec, hardware: HardwareConfig, *, limit: int = 4096) -> int:
    """The largest batch that fits at this context; 0 if none does."""
    return _most_that_fit(lambda rows: replace(spec, batch_size=rows), hardware, limit)


def largest_context(spec: PlanSpec, hardware: HardwareConfig) -> int:
    """The longest row (prompt and new tokens) that fits at this batch size and in the context."""
    limit = spec.target.shape.max_position_embeddings - spec.max_new_tokens
    prompt = _most_that_fit(lambda tokens: replace(spec, prompt_tokens=tokens), hardware, limit)
    return prompt + spec.max_new_tokens if prompt else 0


def _most_that_fit(spec_of: Callable[[int], PlanSpec], hardware: HardwareConfig, limit: int) -> int:
    """The largest number up to `limit` whose spec fits; 0 if none.

    The bytes grow almost linearly with the number. Each step interpolates between both ends to where no byte is free;
    every third step bisects.
    """

    def free_bytes(number: int) -> float:
        try:
            return fullest_rank(spec_of(number), hardware).free_bytes
        except PlacementError:
            return -math.inf

    low, high = min(limit, 1), limit
    free, lacking = free_bytes(low), free_bytes(high)
    if lacking >= 0 or free < 0:
        return high if lacking >= 0 else 0
    halves = cycle((False, False, True))
    while high - low > 1:
        share = 0.5 if next(halves) or math.isinf(lacking) else free / (free - lacking)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        found = free_bytes(middle)
        low, high, free, lacking = (middle, high, found, lacking) if found >= 0 else (low, middle, free, found)
    return low
