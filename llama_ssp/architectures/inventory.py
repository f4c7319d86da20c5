"""Which parameters a model has, family by family, and which of them a rank holds.

The slices are those of `sharding`, which the loader reads too. How many bytes they take says `weights`.
Shapes: H query heads, N key-value heads, D head dim, E hidden size, I MLP units, V vocabulary, P positions.
"""

from dataclasses import dataclass, replace

from llama_ssp.architectures.sharding import RankShard, cut_of
from llama_ssp.config.schema import ModelShape
from llama_ssp.errors import PlacementError


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
"""Families that the lean decoder computes."""
GEMMA_KIND = {"gemma", "gemma2", "gemma3_text"}


def inventory(shape: ModelShape) -> Inventory:
    """List the parameters of a family by its `model_type`.

    Raises:
        PlacementError: the family is not known here.
    """
    check_family(shape.model_type)
    return _FAMILIES[shape.model_type](shape)


def check_family(model_type: str) -> None:
    """Refuse families whose parameters are not listed here.

    Raises:
        PlacementError: it is none of them.
    """
    if model_type not in _FAMILIES:
        *known, last = sorted(_FAMILIES)
        message = f"{model_type} models are not supported: one of {', '.join(known)} or {last} is required"
        raise PlacementError(message)


def attention_pair_bytes(shape: ModelShape, *, num_heads: int, value_bytes: int) -> int:
    """What a forward keeps for each pair of a position and a slot that it may see.

    A mask for each window of the layers, which GPT-Neo's model stacks; and, where no kernel of its own has the form of
    attention, the scores of all heads, and in fp32 what becomes of them.
    """
    num_masks = {"gemma2": 2, "gemma3_text": 2, "gpt_neo": 4}.get(shape.model_type, 1)
    scores = num_heads * (value_bytes + 4) if shape.model_type == "gemma2" else 0
    return 1 + num_masks * value_bytes + scores


def _gated(shape: ModelShape) -> Inventory:
    """Llama, Gemma and their kin: grouped-query attention, gated MLP, root-mean-square norms."""
    width, units, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    has_bias = shape.model_type == "qwen2"
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms = 4 if shape.model_type in {"gemma2", "gemma3_text"} else 2
    head_norms = 2 if shape.model_type in {"qwen3", "gemma3_text"} else 0
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
        layer_vectors=norms * width + head_norms * dim,
        embeddings=(Matrix(module="embed_tokens", num_rows=shape.vocab_size, num_columns=width, cut=0),),
        head=_head(shape),
        final_vectors=width,
        num_layers=shape.num_hidden_layers,
    )


def _phi(shape: ModelShape) -> Inventory:
    """Phi: one layer norm for attention and MLP together, biases everywhere."""
    width, units, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    columns = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "fc1": units}
    rows = {"dense": queries, "fc2": units}
    head = _head(shape)
    return Inventory(
        layer=(
            *(Matrix(module=m, num_rows=n, num_columns=width, cut=0, has_bias=True) for m, n in columns.items()),
            *(Matrix(module=m, num_rows=width, num_columns=n, cut=1, has_bias=True) for m, n in rows.items()),
        ),
        layer_vectors=2 * width,
        embeddings=(Matrix(module="embed_tokens", num_rows=shape.vocab_size, num_columns=width, cut=0),),
        head=head and replace(head, has_bias=True),
        final_vectors=2 * width,
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
    """GPT-Neo: learned positions, which stay whole, layer norms, plain MLP."""
    width, units = shape.hidden_size, shape.intermediate_size
    return Inventory(
        layer=(
            *(Matrix(module=name, num_rows=width, num_columns=width, cut=0) for name in ("q_proj", "k_proj", "v_proj")),
            Matrix(module="out_proj", num_rows=width, num_columns=width, cut=1, has_bias=True),
            Matrix(module="c_fc", num_rows=units, num_columns=width, cut=0, has_bias=True),
            Matrix(module="c_proj", num_rows=width, num_columns=units, cut=1, has_bias=True),
        ),
        layer_vectors=4 * width,
        embeddings=(
            Matrix(module="wte", num_rows=shape.vocab_size, num_columns=width, cut=0),
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


_FAMILIES = dict.fromkeys(LLAMA_KIND | GEMMA_KIND, _gated) | {"gpt_neox": _gpt_neox, "gpt_neo": _gpt_neo, "phi": _phi}
