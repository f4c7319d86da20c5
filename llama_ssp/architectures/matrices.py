"""The parameters of a model as a list of matrices, and the slice of each that a rank of a tensor-parallel group holds.

Pure integer arithmetic: the loader reads the slices, and the planner counts their bytes. The model's `tp_plan` decides
which matrices are sharded.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from llama_ssp.errors import PlacementError
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of
from llama_ssp.settings.schema import ModelShape, WholeParts

# Matrix units prefer multiples of 64, and nf4 packs weights in groups of 64.
BLOCK = 64


def split_blocks(size: int, num_parts: int, *, block: int = 1) -> tuple[range, ...]:
    """Split `size` units into consecutive, nearly equal parts, the largest first; fewer blocks than parts are refused.

    Parts begin at multiples of `block`; only the last one may end between two.
    """
    num_blocks = -(-size // block)
    if num_blocks < num_parts:
        raise PlacementError(
            f"{num_blocks} blocks cannot be shared by {num_parts} ranks: use at most {num_blocks} ranks"
        )
    smaller, num_bigger = divmod(num_blocks, num_parts)
    counts = [smaller + (part < num_bigger) for part in range(num_parts)]
    edges = [min(count * block, size) for count in accumulate(counts, initial=0)]
    return tuple(range(start, stop) for start, stop in pairwise(edges))


@dataclass(frozen=True, kw_only=True)
class HeadShard:
    """The attention heads of one rank: its key-value heads and the query heads that read them."""

    query_heads: range
    kv_heads: range


def split_heads(*, num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShard, ...]:
    """Split attention heads at the boundaries of key-value groups; PlacementError for too many ranks or uneven groups.

    If there are more ranks than key-value heads, groups are split, and each of their ranks has the key-value head.

        8 heads, 4 kv heads, 3 ranks:  | 0 1 2 3 | 4 5 | 6 7 |     kv  | 0 1 | 2 | 3 |
        4 heads, 2 kv heads, 3 ranks:  | 0 | 1 | 2 3 |             kv  | 0 | 0 | 1 |
    """
    if num_ranks > num_heads:
        message = f"{num_heads} attention heads cannot be shared by {num_ranks} ranks: use at most {num_heads} ranks"
        raise PlacementError(message)
    group, remainder = divmod(num_heads, num_kv_heads)
    if remainder:
        raise PlacementError(f"{num_heads} query heads over {num_kv_heads} key-value heads: a multiple is required")
    if num_ranks <= num_kv_heads:
        return tuple(
            HeadShard(query_heads=range(part.start * group, part.stop * group), kv_heads=part)
            for part in split_blocks(num_kv_heads, num_ranks)
        )
    return tuple(
        HeadShard(query_heads=range(first + part.start, first + part.stop), kv_heads=range(kv_head, kv_head + 1))
        for kv_head, ranks in enumerate(split_blocks(num_ranks, num_kv_heads))
        for first in [kv_head * group]
        for part in split_blocks(group, len(ranks))
    )


class Cut(Enum):
    """Units along which a matrix is split."""

    query_heads = "query heads"
    kv_heads = "key-value heads"
    fused_qkv = "heads, each with its query, key and value"
    mlp_units = "MLP units"
    vocabulary = "vocabulary"


HEAD_CUTS = frozenset({Cut.query_heads, Cut.kv_heads, Cut.fused_qkv})
_EMBEDDINGS = ("embed_tokens", "wte")
_CUTS = {
    **dict.fromkeys(("q_proj", "o_proj", "out_proj", "dense"), Cut.query_heads),
    **dict.fromkeys(("k_proj", "v_proj"), Cut.kv_heads),
    "query_key_value": Cut.fused_qkv,
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), Cut.mlp_units),
    **dict.fromkeys(("dense_h_to_4h", "dense_4h_to_h", "fc1", "fc2", "c_fc", "c_proj"), Cut.mlp_units),
    **dict.fromkeys((*_EMBEDDINGS, "lm_head"), Cut.vocabulary),
}


def cut_of(module: str) -> Cut:
    """The units that a module's weight is split along, by the end of its name; an unknown one raises PlacementError."""
    try:
        return _CUTS[module.rpartition(".")[2]]
    except KeyError:
        raise PlacementError(f"no rule says how to cut {module} over ranks: run this model on one rank") from None


def stays_whole(module: str, whole: WholeParts) -> bool:
    """Whether every rank holds all of a module that would be cut otherwise; raises as `cut_of`."""
    is_embedding = module.rpartition(".")[2] in _EMBEDDINGS
    return (is_embedding and whole.keeps_embedding) or (cut_of(module) in HEAD_CUTS and whole.keeps_attention)


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """One rank's part of a model: attention heads, MLP units, and token ids of embedding and output head."""

    heads: HeadShard
    head_dim: int
    mlp_units: range
    vocabulary: range

    def features(self, cut: Cut) -> range:
        """The rows (column-parallel) or columns (row-parallel) of a matrix that this rank holds."""
        units, width = {
            Cut.query_heads: (self.heads.query_heads, self.head_dim),
            Cut.kv_heads: (self.heads.kv_heads, self.head_dim),
            Cut.fused_qkv: (self.heads.query_heads, 3 * self.head_dim),  # contiguous: [head][q, k, v][dim]
            Cut.mlp_units: (self.mlp_units, 1),
            Cut.vocabulary: (self.vocabulary, 1),
        }[cut]
        return range(units.start * width, units.stop * width)


def split_model(
    shape: ModelShape, *, num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none
) -> tuple[RankShard, ...]:
    """Split a model over the ranks of a tensor-parallel group; PlacementError for more ranks than units of a kind.

    MLP units and vocabulary are split in blocks of 64, or of a larger group of the quantization, if there are enough.
    Where attention stays whole, every rank has all heads.
    """
    num_heads, num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if whole.keeps_attention:
        heads = (HeadShard(query_heads=range(num_heads), kv_heads=range(num_kv_heads)),) * num_ranks
    else:
        heads = split_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, num_ranks=num_ranks)
    group = math.lcm(BLOCK, format_of(quantization).group)
    units, vocabulary = (
        split_blocks(size, num_ranks, block=block if size > block * (num_ranks - 1) else 1)
        for size, block in ((shape.intermediate_size, group), (shape.vocab_size, BLOCK))
    )
    return tuple(
        RankShard(heads=heads[rank], head_dim=shape.head_dim, mlp_units=units[rank], vocabulary=vocabulary[rank])
        for rank in range(num_ranks)
    )


def widths(shards: Sequence[RankShard], cut: Cut) -> tuple[int, ...]:
    """The number of features on each rank."""
    return tuple(len(shard.features(cut)) for shard in shards)


def check_deepspeed(shape: ModelShape, quantization: str, *, num_ranks: int) -> None:
    """Raise PlacementError for quantized layers, or if ranks would not have equal numbers of key-value groups."""
    if format_of(quantization).is_quantized:
        raise PlacementError(
            f"placement.target.kind=deepspeed splits only unquantized layers, and those of the target are "
            f"{quantization}: use model.quantization=none on unquantized files, or placement.target.kind=tensor"
        )
    num_kv_heads = shape.num_key_value_heads
    if num_kv_heads % num_ranks:
        sizes = [size for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
        raise PlacementError(
            f"placement.target.kind=deepspeed splits {num_kv_heads} key-value heads evenly, and {num_ranks} ranks were "
            f"given: use {', '.join(map(str, sizes))} ranks, or placement.target.kind=tensor"
        )


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix (outputs x inputs, or token ids x width) as the library stores it, or a slice of it.

    `module` is the last part of the module's name, `cut` the dimension that is sharded, None for no dimension.
    """

    module: str
    num_rows: int
    num_columns: int
    cut: int | None = None
    has_bias: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements, without the bias."""
        return self.num_rows * self.num_columns

    def of_rank(self, shard: RankShard) -> "Matrix":
        """The slice that a rank holds."""
        if self.cut is None:
            return self
        width = len(shard.features(cut_of(self.module)))
        rows, columns = (width, self.num_columns) if self.cut == 0 else (self.num_rows, width)
        return replace(self, num_rows=rows, num_columns=columns)


FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up")
"""Modules with one input, which one product computes."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All parameters of a model, or those of one rank."""

    layer: tuple[Matrix, ...]  # matrices of each layer, which quantization applies to.
    layer_vectors: int  # elements of the norms of each layer, whole on every rank.
    embeddings: tuple[Matrix, ...]  # lookup tables.
    head: Matrix | None  # the output matrix; None if it is tied to the embedding.
    final_vectors: int  # elements of the last norm.
    num_layers: int

    def __hash__(self) -> int:
        """Equal inventories have equal hashes."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layer, self.embeddings, self.num_layers, self.layer_vectors, self.final_vectors))

    @cached_property
    def matrix_sizes(self) -> Mapping[int, int]:
        """How many matrices of a layer have so many elements."""
        return Counter(matrix.num_elements for matrix in self.layer)

    @cached_property
    def products(self) -> tuple[int, ...]:
        """Elements of each matrix product of a layer; matrices with the same input are fused into one."""
        sizes = Counter[str]()
        for matrix in self.layer:
            sizes[FUSED.get(matrix.module, matrix.module)] += matrix.num_elements
        return tuple(sizes.values())

    @property
    def output(self) -> Matrix:
        """The matrix that makes the logits."""
        return self.head or self.embeddings[0]

    @property
    def num_all_reduces(self) -> int:
        """Those of a forward under tensor parallelism: behind each row-parallel matrix, and behind a cut embedding."""
        has_cut_embedding = any(table.cut is not None for table in self.embeddings)
        return self.num_layers * sum(matrix.cut == 1 for matrix in self.layer) + has_cut_embedding

    def keeping(self, whole: WholeParts) -> "Inventory":
        """The parameters with some of them not to be cut; each rank then has its slice of a tied head as a copy."""

        def kept(matrix: Matrix) -> Matrix:
            is_cut = matrix.cut is not None and not stays_whole(matrix.module, whole)
            return matrix if is_cut else replace(matrix, cut=None)

        embeddings, head = tuple(map(kept, self.embeddings)), self.head
        if head is None and embeddings != self.embeddings:
            head = replace(self.embeddings[0], module="lm_head")
        return replace(self, layer=tuple(map(kept, self.layer)), embeddings=embeddings, head=head)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, biases and norms included."""
        tables = [*self.embeddings, *([self.head] if self.head else [])]
        biases = sum(matrix.num_rows for matrix in self.layer if matrix.has_bias)
        layer = sum(matrix.num_elements for matrix in self.layer) + self.layer_vectors + biases
        return self.num_layers * layer + sum(table.num_elements for table in tables) + self.final_vectors

    def of_rank(self, shard: RankShard) -> "Inventory":
        """The parameters of one rank."""
        return replace(
            self,
            layer=tuple(matrix.of_rank(shard) for matrix in self.layer),
            embeddings=tuple(matrix.of_rank(shard) for matrix in self.embeddings),
            head=self.head and self.head.of_rank(shard),
        )

    def of_layers(self, num_layers: int, *, first: bool, last: bool) -> "Inventory":
        """Consecutive layers: the first ones with the embeddings, the last ones with the final norm and the head."""
        head = self.head if last else None
        embeddings = self.embeddings if first or (last and head is None) else ()
        final_vectors = self.final_vectors if last else 0
        return replace(self, embeddings=embeddings, head=head, final_vectors=final_vectors, num_layers=num_layers)


def inventory_of(
    shape: ModelShape,
    layer: Mapping[str, tuple[int, int]],
    *,
    biased: Collection[str] = (),
    layer_vectors: int,
    final_vectors: int,
    embeddings: tuple[Matrix, ...] = (),
) -> Inventory:
    """List the parameters of a model, whose embedding has the usual name and cut unless `embeddings` are given.

    `layer` has the matrices by name: the features on the side that is not the model's width, and that side, which is
    the one to cut, 0 for outputs and 1 for inputs.
    """
    width = shape.hidden_size
    token_ids: Mapping[str, Any] = {"num_rows": shape.vocab_size, "num_columns": width, "cut": 0}
    head = None if shape.tie_word_embeddings else Matrix(module="lm_head", has_bias="lm_head" in biased, **token_ids)
    matrices = (
        Matrix(module=name, num_rows=rows, num_columns=columns, cut=cut, has_bias=name in biased)
        for name, (size, cut) in layer.items()
        for rows, columns in [(size, width) if cut == 0 else (width, size)]
    )
    return Inventory(
        layer=tuple(matrices),
        layer_vectors=layer_vectors,
        embeddings=embeddings or (Matrix(module="embed_tokens", **token_ids),),
        head=head,
        final_vectors=final_vectors,
        num_layers=shape.num_hidden_layers,
    )


def gated(
    shape: ModelShape, *, has_qkv_bias: bool = False, norms_per_layer: int = 2, has_head_norms: bool = False
) -> Inventory:
    """List the parameters of Llama, Gemma and similar models: grouped-query attention, gated MLP, RMS norms.

    `has_head_norms` means norms of queries and keys over the head dim.
    """
    units, dim = shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    return inventory_of(
        shape,
        {
            "q_proj": (queries, 0), "k_proj": (keys, 0), "v_proj": (keys, 0), "o_proj": (queries, 1),
            "gate_proj": (units, 0), "up_proj": (units, 0), "down_proj": (units, 1),
        },
        biased=("q_proj", "k_proj", "v_proj") if has_qkv_bias else (),
        layer_vectors=norms_per_layer * shape.hidden_size + 2 * dim * has_head_norms,
        final_vectors=shape.hidden_size,
    )  # fmt: skip
