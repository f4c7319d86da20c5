"""Which parameters a model has, and how many bytes of them a rank holds: exact, in every precision.

The slices are those of `sharding`, which the loader reads too. Nothing here knows time or hardware.
Shapes: H query heads, N key-value heads, D head dim, E hidden size, I MLP units, V vocabulary, P positions.
"""

from dataclasses import dataclass, replace

from llama_ssp.config.schema import Dtype, ModelShape, Quantization
from llama_ssp.errors import PlacementError
from llama_ssp.planning.sharding import RankShard, cut_of, split_model

DTYPE_BYTES = {Dtype.fp32: 4, Dtype.bf16: 2, Dtype.fp16: 2}
SCALE_BYTES = 4
NF4_GROUP, HALF_BLOCK = 64, 512


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix as the library stores it, or a slice of it.

    Attributes:
        module: last part of its module's name.
        num_rows, num_columns: outputs and inputs; of an embedding, token ids and width.
        cut: the dimension along which ranks share it; None when every rank holds it whole.
        has_bias: whether a bias of `num_rows` goes with it.
    """

    module: str
    num_rows: int
    num_columns: int
    cut: int | None = None
    has_bias: bool = False

    @property
    def num_elements(self) -> int:
        """Numbers in the matrix."""
        return self.num_rows * self.num_columns

    def of_rank(self, shard: RankShard) -> "Matrix":
        """The slice that a rank holds."""
        if self.cut is None:
            return self
        width = len(shard.features(cut_of(self.module)))
        rows, columns = (width, self.num_columns) if self.cut == 0 else (self.num_rows, width)
        return replace(self, num_rows=rows, num_columns=columns)


_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up")


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All parameters of a model, or those that one rank holds.

    Attributes:
        layer: matrices of each layer; these are what quantization changes.
        layer_vectors: numbers in the norms of each layer, whole on every rank.
        embeddings: tables that are looked up.
        head: the output matrix; None where it is the embedding's.
        final_vectors: numbers in the last norm.
        num_layers: how many layers.
    """

    layer: tuple[Matrix, ...]
    layer_vectors: int
    embeddings: tuple[Matrix, ...]
    head: Matrix | None
    final_vectors: int
    num_layers: int

    @property
    def products(self) -> tuple[int, ...]:
        """Elements of the matrices of a layer as they are multiplied: those with the same input are one product."""
        sizes: dict[str, int] = {}
        for matrix in self.layer:
            name = _FUSED.get(matrix.module, matrix.module)
            sizes[name] = sizes.get(name, 0) + matrix.num_elements
        return tuple(sizes.values())

    @property
    def output(self) -> Matrix:
        """The matrix that makes the logits."""
        return self.head or self.embeddings[0]

    def of_rank(self, shard: RankShard) -> "Inventory":
        """What one rank holds."""
        return Inventory(
            layer=tuple(matrix.of_rank(shard) for matrix in self.layer),
            layer_vectors=self.layer_vectors,
            embeddings=tuple(matrix.of_rank(shard) for matrix in self.embeddings),
            head=self.head and self.head.of_rank(shard),
            final_vectors=self.final_vectors,
            num_layers=self.num_layers,
        )

    def of_layers(self, num_layers: int, *, first: bool, last: bool) -> "Inventory":
        """A run of whole layers: the first with the embeddings, the last with the last norm and the head."""
        head = self.head if last else None
        embeddings = self.embeddings if first or (last and head is None) else ()
        return Inventory(
            layer=self.layer,
            layer_vectors=self.layer_vectors,
            embeddings=embeddings,
            head=head,
            final_vectors=self.final_vectors if last else 0,
            num_layers=num_layers,
        )


LLAMA_KIND = {"llama", "mistral", "qwen2", "qwen3"}


def inventory(shape: ModelShape) -> Inventory:
    """List the parameters of a family by its `model_type`.

    Raises:
        PlacementError: the family is not known here.
    """
    if shape.model_type in LLAMA_KIND:
        return _gated(shape)
    families = {"gpt_neox": _gpt_neox, "gpt_neo": _gpt_neo}
    if shape.model_type in families:
        return families[shape.model_type](shape)
    known = ", ".join(sorted({*LLAMA_KIND, *families}))
    raise PlacementError(f"the planner does not know which parameters a {shape.model_type} model has: it knows {known}")


def _gated(shape: ModelShape) -> Inventory:
    """Llama and its kin: grouped-query attention, gated MLP, root-mean-square norms."""
    width, units, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    has_bias = shape.model_type == "qwen2"
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return Inventory(
        layer=(
            *(
                Matrix(module=name, num_rows=rows, num_columns=width, cut=0, has_bias=has_bias)
                for name, rows in projections.items()
            ),
            Matrix(module="o_proj", num_rows=width, num_columns=queries, cut=1),
            Matrix(module="gate_proj", num_rows=units, num_columns=width, cut=0),
            Matrix(module="up_proj", num_rows=units, num_columns=width, cut=0),
            Matrix(module="down_proj", num_rows=width, num_columns=units, cut=1),
        ),
        layer_vectors=2 * width + (2 * dim if shape.model_type == "qwen3" else 0),
        embeddings=(Matrix(module="embed_tokens", num_rows=shape.vocab_size, num_columns=width, cut=0),),
        head=_head(shape),
        final_vectors=width,
        num_layers=shape.num_hidden_layers,
    )


def _gpt_neox(shape: ModelShape) -> Inventory:
    """GPT-NeoX: fused attention, plain MLP, layer norms; its embedding is no plain table and stays whole."""
    width, units = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    return Inventory(
        layer=(
            Matrix(module="query_key_value", num_rows=3 * queries, num_columns=width, cut=0, has_bias=True),
            Matrix(module="dense", num_rows=width, num_columns=queries, cut=1, has_bias=True),
            Matrix(module="dense_h_to_4h", num_rows=units, num_columns=width, cut=0, has_bias=True),
            Matrix(module="dense_4h_to_h", num_rows=width, num_columns=units, cut=1, has_bias=True),
        ),
        layer_vectors=4 * width,
        embeddings=(Matrix(module="embed_in", num_rows=shape.vocab_size, num_columns=width),),
        head=_head(shape),
        final_vectors=2 * width,
        num_layers=shape.num_hidden_layers,
    )


def _gpt_neo(shape: ModelShape) -> Inventory:
    """GPT-Neo: learned positions, layer norms, no tensor-parallel plan."""
    width, units = shape.hidden_size, shape.intermediate_size
    return Inventory(
        layer=(
            *(Matrix(module=name, num_rows=width, num_columns=width) for name in ("q_proj", "k_proj", "v_proj")),
            Matrix(module="out_proj", num_rows=width, num_columns=width, has_bias=True),
            Matrix(module="c_fc", num_rows=units, num_columns=width, has_bias=True),
            Matrix(module="c_proj", num_rows=width, num_columns=units, has_bias=True),
        ),
        layer_vectors=4 * width,
        embeddings=(
            Matrix(module="wte", num_rows=shape.vocab_size, num_columns=width),
            Matrix(module="wpe", num_rows=shape.max_position_embeddings, num_columns=width),
        ),
        head=_head(shape),
        final_vectors=2 * width,
        num_layers=shape.num_hidden_layers,
    )


def _head(shape: ModelShape) -> Matrix | None:
    if shape.tie_word_embeddings:
        return None
    return Matrix(module="lm_head", num_rows=shape.vocab_size, num_columns=shape.hidden_size, cut=0)


def shares(shape: ModelShape, *, num_ranks: int) -> tuple[Inventory, ...]:
    """What each rank of a tensor-parallel group holds.

    Raises:
        PlacementError: the family is unknown or has no tensor-parallel plan, or the sizes cannot be shared so.
    """
    whole = inventory(shape)
    if num_ranks == 1:
        return (whole,)
    if not any(matrix.cut is not None for matrix in whole.layer):
        raise PlacementError(f"{shape.model_type} has no tensor-parallel plan: run it on one rank, not on {num_ranks}")
    return tuple(whole.of_rank(shard) for shard in split_model(shape, num_ranks=num_ranks))


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of an inventory.

    Attributes:
        sharded_bytes: matrices, biases and scales of which every rank holds another part.
        repeated_bytes: norms, and whatever else every rank holds whole: row-parallel biases, uncut tables.
        repeated_scale_bytes: row scales of quantized row-parallel matrices, which every rank keeps for its columns.
        beside_bytes: what a loader holds beside the weights: the biggest tensor, or a layer that is to be quantized.
    """

    sharded_bytes: int
    repeated_bytes: int
    repeated_scale_bytes: int
    beside_bytes: int

    @property
    def on_every_rank_bytes(self) -> int:
        """What each rank of the model holds alike."""
        return self.repeated_bytes + self.repeated_scale_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.sharded_bytes + self.on_every_rank_bytes


def weight_bytes(
    held: Inventory, *, dtype: Dtype, quantization: Quantization, matrix_dtype: Dtype | None = None
) -> WeightBytes:
    """Count the bytes of what a rank holds.

    `matrix_dtype` is the linear layers' own format, if they have one; a head that is the embedding too is then a copy.
    Quantized layouts: int8 of bitsandbytes keeps a byte per weight and an fp32 scale per output row; nf4 half a byte
    and an fp32 scale per 64 weights; int8_weight_only a byte and a scale per output row in the model's number format,
    in which embeddings, head, norms and biases stay.
    """
    size = DTYPE_BYTES[dtype]
    matrix_size = DTYPE_BYTES[matrix_dtype or dtype]
    kept = _in_blocks if matrix_size != size else lambda matrix: matrix
    sharded = repeated = scales = 0
    for matrix in held.layer:
        stored = packed_bytes(kept(matrix), matrix_size, quantization)
        row_scales = _row_scale_bytes(size, quantization) * matrix.num_rows
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
        table_bytes[matrix.cut is None] += value_bytes * matrix.num_elements
    beside = max((matrix.num_elements for matrix in (*held.layer, *(table for table, _ in tables))), default=0)
    if quantization is not Quantization.none:
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
    """A matrix as FBGEMM's product keeps it: the last block of inputs is as long as the others."""
    return replace(matrix, num_columns=HALF_BLOCK * -(-matrix.num_columns // HALF_BLOCK))


def packed_bytes(matrix: Matrix, dtype_bytes: int, quantization: Quantization) -> int:
    """Bytes of a matrix of a layer, scales per row left out."""
    match quantization:
        case Quantization.none:
            return dtype_bytes * matrix.num_elements
        case Quantization.nf4:
            return -(-matrix.num_elements // 2) + SCALE_BYTES * -(-matrix.num_elements // NF4_GROUP)
        case _:
            return matrix.num_elements


def _row_scale_bytes(dtype_bytes: int, quantization: Quantization) -> int:
    return {Quantization.int8: SCALE_BYTES, Quantization.int8_weight_only: dtype_bytes}.get(quantization, 0)
