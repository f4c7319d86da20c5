"""Computes the exact bytes of a rank's parameters in every precision, from the list in `architectures.inventory`."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.inventory import Inventory, Matrix
from llama_ssp.architectures.sharding import RankShard, split_model
from llama_ssp.config.formats import NO_QUANTIZATION, format_of
from llama_ssp.config.schema import Dtype, ModelShape, WholeParts

DTYPE_BYTES = {Dtype.fp32: 4, Dtype.bf16: 2, Dtype.fp16: 2}
HALF_BLOCK = 512
COMPILED_BLOCK = 16


def shares(
    shape: ModelShape, *, num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none
) -> tuple[Inventory, ...]:
    """The parameters of each rank of a tensor-parallel group; an impossible split is refused."""
    parameters = inventory(shape)
    if num_ranks == 1:
        return (parameters,)
    return _shares(parameters, shards(shape, num_ranks=num_ranks, quantization=quantization, whole=whole), whole)


@lru_cache(maxsize=512)  # a search asks for the same shares hundreds of times
def _shares(parameters: Inventory, parts: tuple[RankShard, ...], whole: WholeParts) -> tuple[Inventory, ...]:
    """The shares of a model that is split like this; ranks with equal ones have the same object."""
    kept = parameters.keeping(whole)
    found: dict[Inventory, Inventory] = {}
    held = (kept.of_rank(shard) for shard in parts)
    return tuple(found.setdefault(share, share) for share in held)


def shards(
    shape: ModelShape, *, num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none
) -> tuple[RankShard, ...]:
    """The slices of each rank, as `split_model` cuts them; raises as it does."""
    return _shards(tuple(vars(shape).items()), num_ranks=num_ranks, quantization=quantization, whole=whole)


@lru_cache(maxsize=512)
def _shards(
    sizes: tuple[tuple[str, Any], ...], *, num_ranks: int, quantization: str, whole: WholeParts
) -> tuple[RankShard, ...]:
    return split_model(ModelShape(**dict(sizes)), num_ranks=num_ranks, quantization=quantization, whole=whole)


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of an inventory.

    Attributes:
        sharded_bytes: matrices, biases and scales of which every rank holds a different part.
        repeated_bytes: norms, row-parallel biases and unsharded tables, which every rank holds whole.
        repeated_scale_bytes: row scales of quantized row-parallel matrices, which every rank has for its columns.
        beside_bytes: temporary bytes while loading: the largest tensor, or a layer before quantization.
    """

    sharded_bytes: int
    repeated_bytes: int
    repeated_scale_bytes: int
    beside_bytes: int

    @property
    def on_every_rank_bytes(self) -> int:
        """Bytes that every rank repeats."""
        return self.repeated_bytes + self.repeated_scale_bytes

    @property
    def total_bytes(self) -> int:
        """Sum of the parts that stay."""
        return self.sharded_bytes + self.on_every_rank_bytes


@lru_cache(maxsize=2048)
def weight_bytes(held: Inventory, *, dtype: Dtype, quantization: str, matrix_dtype: Dtype | None = None) -> WeightBytes:
    """Count the bytes of a rank's parameters.

    `matrix_dtype` is the number format of the linear layers, if different; a tied head is then a copy. `quantization`
    applies to the matrices of layers. Embeddings, head, norms and biases stay in the model's number format.
    """
    storage, size = format_of(quantization), DTYPE_BYTES[dtype]
    matrix_size = DTYPE_BYTES[matrix_dtype or dtype]
    kept = _in_blocks if matrix_size != size else lambda matrix: matrix
    layer_kept = (lambda matrix: matrix) if storage.is_quantized else kept
    sharded = repeated = scales = 0
    for matrix in held.layer:
        stored = storage.matrix_bytes(layer_kept(matrix).num_elements, matrix_size)
        row_scales = storage.row_bytes(size) * matrix.num_rows
        bias = size * matrix.num_rows if matrix.has_bias else 0
        if matrix.cut is None:
            repeated += stored + row_scales + bias
        elif matrix.cut == 0:
            sharded += stored + row_scales + bias
        else:
            sharded, scales, repeated = sharded + stored, scales + row_scales, repeated + bias
    tables = [(matrix, size) for matrix in held.embeddings]
    tables += [(kept(held.output), matrix_size)] if held.head or matrix_size != size else []
    table_bytes = {True: 0, False: 0}
    for matrix, value_bytes in tables:
        num_values = matrix.num_elements + (matrix.num_rows if matrix.has_bias else 0)
        table_bytes[matrix.cut is None] += value_bytes * num_values
    beside = max((matrix.num_elements for matrix in (*held.layer, *(table for table, _ in tables))), default=0)
    if storage.is_quantized:
        beside = max(beside, sum(matrix.num_elements for matrix in held.layer))
    return WeightBytes(
        sharded_bytes=held.num_layers * sharded + table_bytes[False],
        repeated_bytes=held.num_layers * (repeated + size * held.layer_vectors)
        + size * held.final_vectors
        + table_bytes[True],
        repeated_scale_bytes=held.num_layers * scales,
        beside_bytes=size * beside,
    )


def _in_blocks(matrix: Matrix) -> Matrix:
    """A matrix in 16 bits: as it is for the compiled kernel, with the inputs padded to whole blocks for FBGEMM's."""
    if matrix.num_rows % COMPILED_BLOCK == matrix.num_columns % COMPILED_BLOCK == 0:
        return matrix
    return replace(matrix, num_columns=HALF_BLOCK * -(-matrix.num_columns // HALF_BLOCK))
