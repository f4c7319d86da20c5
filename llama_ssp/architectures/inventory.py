"""The parameters of a model as a list of matrices, and the slices that a rank holds, as `sharding` cuts them."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from llama_ssp.architectures.sharding import RankShard, cut_of, stays_whole
from llama_ssp.settings.schema import ModelShape, WholeParts


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


_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up")


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
            sizes[_FUSED.get(matrix.module, matrix.module)] += matrix.num_elements
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
