"""The parameters of a model as a list of matrices, and which of them a rank holds.

Each family lists its own (`family.Family.parameters`). The slices are those of `sharding`, which the loader reads too;
`planning.weights` counts their bytes.
"""

from dataclasses import dataclass, replace

from llama_ssp.architectures.sharding import RankShard, cut_of


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
