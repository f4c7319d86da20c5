"""Counts the bytes of a model's weights, whole and on each rank, and the bytes that one forward reads.

They are exact: the loader places slices by the same arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from llama_ssp.architectures.family import check_ranks, inventory, kept_whole, record_of
from llama_ssp.architectures.matrices import (
    FUSED,
    Inventory,
    Matrix,
    RankShard,
    WholeParts,
    check_inputs,
    split_model,
)
from llama_ssp.catalogue import Dtype, ModelShape
from llama_ssp.planning.model import COMPILED_BLOCK, DTYPE_BYTES, PlannedModel
from llama_ssp.settings.backends import TENSOR, Backend
from llama_ssp.storage.formats import NO_QUANTIZATION, ORDER_BYTES, StorageFormat

HALF_BLOCK = 512


def shares(
    shape: ModelShape, *, num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none
) -> tuple[Inventory, ...]:
    """The parameters of each rank of a tensor-parallel group; an impossible split is refused."""
    return split(tuple(vars(shape).items()), num_ranks=num_ranks, quantization=quantization, whole=whole)[1]


@lru_cache(maxsize=512)  # a search asks for the same shares hundreds of times
def split(
    sizes: tuple[tuple[str, Any], ...], *, num_ranks: int, quantization: str, whole: WholeParts
) -> tuple[tuple[RankShard, ...], tuple[Inventory, ...]]:
    """The slices of each rank of a model with these sizes, and its parameters; equal slices are the same object."""
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
def model_bytes(held: Inventory, model: PlannedModel, *, device: str) -> WeightBytes:
    """Count the bytes of a rank's parameters of a model, as stored on `device`; of layers that differ one by one."""
    found = [_bytes_of_alike(part, model, device=device) for part in held.parts]
    return WeightBytes(
        sharded_bytes=sum(part.sharded_bytes for part in found),
        repeated_bytes=sum(part.repeated_bytes for part in found),
        temporary_bytes=max(part.temporary_bytes for part in found),
    )


@lru_cache(maxsize=2048)
def _bytes_of_alike(held: Inventory, model: PlannedModel, *, device: str) -> WeightBytes:
    """The bytes of parameters with layers that are alike.

    The quantization applies to the matrices of layers. Embeddings, norms, biases and heads stay in the model's number
    format, but for a head that is stored as the linear layers are (`PlannedModel.matrix_dtype`): a tied one is then a
    copy. A layout with scattered groups stores an order of the inputs for each product; in the lean decoder
    matrices with the same input form one.
    """
    storage, layout = model.storage, model.layout
    size, matrix_size = DTYPE_BYTES[model.dtype], DTYPE_BYTES[model.matrix_dtype(device)]
    kept = _in_blocks if matrix_size != size else lambda matrix: matrix
    layer_kept = (lambda matrix: matrix) if storage.is_quantized else kept
    sharded = repeated = 0
    products = dict[str, list[tuple[int, int]]]()
    for matrix in held.layer:
        product = FUSED.get(matrix.module, matrix.module) if model.is_lean else matrix.module
        in_group = (layout.group if layout else storage.packing.group_of(matrix.num_columns)) or matrix.num_columns
        stored = storage.packing.matrix_bytes(
            layer_kept(matrix).num_elements, matrix_size, group=in_group if storage.packing.groups else 0
        )
        if layout and layout.is_scattered:
            columns = matrix.num_columns
            if columns < matrix.whole_columns:
                columns = layout.num_with_gaps(columns, of=matrix.whole_columns)
                elements = replace(matrix, num_columns=columns).num_elements
                stored = storage.packing.matrix_bytes(elements, matrix_size, group=storage.packing.least_group)
            stored += 0 if product in products else round(ORDER_BYTES * matrix.copies * columns)
        row_scales = round(storage.packing.row_bytes * matrix.num_rows * matrix.copies)
        if matrix.is_plain or matrix.is_kept:
            stored, row_scales = (matrix_size, size)[matrix.is_plain] * kept(matrix).num_elements, 0
        bias = size * matrix.num_rows if matrix.has_bias else 0
        if matrix.cut is None:
            repeated += stored + row_scales + bias
        elif matrix.cut == 0:
            sharded += stored + row_scales + bias
        else:
            sharded, repeated = sharded + stored, repeated + row_scales + bias
        products.setdefault(product, []).append((stored if layout else size * matrix.num_elements, stored + row_scales))
    tables = [(matrix, size, size * matrix.num_elements) for matrix in held.embeddings]
    packs = _packs_output(held, model, device)
    if held.head or packs:
        output = kept(held.output)
        tables.append((output, matrix_size, matrix_size * output.num_elements))
    table_bytes = {True: 0, False: 0}
    for matrix, value_bytes, stored in tables:
        table_bytes[matrix.cut is None] += stored + (value_bytes * matrix.num_rows if matrix.has_bias else 0)
    temporary = _temporary_bytes(
        [*products.values()], storage, is_half=any(model.packs(matrix, device) for matrix in held.layer)
    )
    # The head, which library modules load last, and the lean decoder first.
    if packs:
        read = size * held.output.num_elements if held.head else 0
        temporary = max(temporary, read + tables[-1][2] - held.num_layers * (sharded + repeated) * model.is_lean)
    return WeightBytes(
        sharded_bytes=held.num_layers * sharded + table_bytes[False],
        repeated_bytes=held.num_layers * repeated + _vector_bytes(held, model, device) + table_bytes[True],
        temporary_bytes=temporary,
    )


def _packs_output(held: Inventory, model: PlannedModel, device: str) -> bool:
    """Whether the output is a copy, see `PlannedModel.packs`; parts without an output of their own have none."""
    return held.scores and bool(held.head or held.embeddings) and model.packs(held.output, device)


def _vector_bytes(held: Inventory, model: PlannedModel, device: str) -> int:
    """Bytes of the norms, which are in fp32 on CPUs in the lean decoder."""
    dtype = Dtype.fp32 if device == "cpu" and model.is_lean else model.dtype
    return DTYPE_BYTES[dtype] * (held.num_layers * held.layer_vectors + held.final_vectors)


def _temporary_bytes(products: Sequence[Sequence[tuple[int, int]]], storage: StorageFormat, *, is_half: bool) -> int:
    """Return the bytes that the loader needs beyond the finished weights, at its peak in the last layer.

    The loader makes one product after the other: it reads the matrices of a product, joins them, and frees them one by
    one. Quantizing, and packing weights in 16 bits (`is_half`), make copies. Without `is_half`, two matrices are read
    ahead.

    `products` has, for each matrix of each product, the bytes that are read and the bytes that stay.
    """
    temporary = 0
    for place, product in enumerate(products):
        later = [*chain.from_iterable(products[place + 1 :])]
        read, stored = map(sum, zip(*product, strict=True))
        copies = product[-1][0] if len(product) > 1 else 0
        if storage.is_quantized or is_half:
            copies = max(copies, storage.cost.loading_copies * stored)
        ahead = 0 if is_half else sum(size for size, _ in later[:2])
        temporary = max(temporary, read + copies + ahead - stored - sum(size for _, size in later))
    return temporary


def _in_blocks(matrix: Matrix) -> Matrix:
    """A matrix in 16 bits: as it is for the compiled kernel, with the inputs padded to whole blocks for FBGEMM's."""
    if matrix.is_plain or matrix.num_rows % COMPILED_BLOCK == matrix.num_columns % COMPILED_BLOCK == 0:
        return matrix
    return replace(matrix, num_columns=HALF_BLOCK * -(-matrix.num_columns // HALF_BLOCK))


def step_bytes(held: Inventory, model: PlannedModel, *, device: str) -> int:
    """Bytes of a rank's weights that one forward reads; an embedding counts only if it is also the head."""
    is_head = held.scores and held.head is None and not _packs_output(held, model, device)
    tables = 0 if is_head else sum(table.num_elements for table in held.embeddings)
    read = replace(held, each=(), layer=tuple(replace(matrix, copies=matrix.num_used(1)) for matrix in held.layer))
    return (
        model_bytes(read if held.experts else held, model, device=device).total_bytes
        - DTYPE_BYTES[model.dtype] * tables
    )


def rank_shares(
    model: PlannedModel, *, num_ranks: int, backend: Backend = TENSOR, whole: WholeParts = WholeParts.none
) -> tuple[Inventory, ...]:
    """The parameters on each rank, or layer-wise on each device; PlacementError if impossible.

    `whole` is what each rank of our own tensor parallelism holds whole.
    """
    shape = model.shape
    if backend.shares:
        return backend.shares(model, num_ranks=num_ranks)
    check_ranks(shape.model_type, num_ranks)
    held = shares(shape, num_ranks=num_ranks, quantization=model.quantization, whole=whole)
    _check_groups(model, held)
    return held


def of_stage(held: Sequence[Inventory], stages: Sequence[range], number: int) -> tuple[Inventory, ...]:
    """The parameters of each rank of a stage, from the parameters of ranks that share all layers."""
    if len(stages) == 1:
        return tuple(held)
    first, last = number == 0, number == len(stages) - 1
    return tuple(share.of_layers(stages[number], first=first, last=last) for share in held)


def _check_groups(model: PlannedModel, held: tuple[Inventory, ...]) -> None:
    """Raise PlacementError if the inputs of a matrix on some rank do not fill the groups of the storage format.

    For families without a record, a plan does not know the matrices; only a run finds this fault.
    """
    storage, layout = model.storage, model.layout
    group = layout.slice_group if layout and layout.slice_group else storage.packing.least_group
    is_known = record_of(model.shape.model_type).is_written
    for matrices in zip(*(share.layer for share in held), strict=True) if is_known else ():
        widths = {matrix.num_columns for matrix in matrices if not matrix.is_kept}
        check_inputs(
            storage.name,
            matrices[0].module,
            widths,
            group=group,
            is_cut=len(held) > 1 and matrices[0].cut == 1,
            num_ranks=len(held),
            is_stored=layout is not None,
            num_experts=model.shape.num_experts if matrices[0].num_chosen else 0,
        )
