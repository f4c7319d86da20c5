"""The parameters of a model as a list of matrices, and the slice of each that a rank of a tensor-parallel group holds.

Pure integer arithmetic: the loader reads the slices, and the planner counts their bytes. The model's `tp_plan` decides
which matrices are sharded.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any

from llama_ssp.architectures.engine import STATE_VALUE_BYTES, kept_inputs
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import PlacementError
from llama_ssp.storage.formats import NO_QUANTIZATION, easiest_format, format_of

# Matrix units prefer multiples of 64, and nf4 packs weights in groups of 64.
_GROUPED_BYTES = 16  # Of which a row of torch's grouped products has a multiple.
BLOCK = 64
EVEN_BLOCKS = (64, 32, 16)  # where ranks then have equal parts, which the smallest product allows.


class WholeParts(Enum):
    """Parts that every rank of a cut model holds whole: a collective less in every forward, or in every layer."""

    none = "none"
    embedding = "embedding"
    attention = "attention"


DRAFT_WHOLE = WholeParts.embedding  # Of a sharded draft, whose steps are short.


@lru_cache(maxsize=4096)
def split_blocks(size: int, num_parts: int, *, block: int = 1, what: str = "units") -> tuple[range, ...]:
    """Split `size` units into consecutive, nearly equal parts, the largest first; fewer blocks than parts are refused.

    Parts begin at multiples of `block`; only the last one may end between two. `what` names the units in errors.
    """
    num_blocks = -(-size // block)
    if num_blocks < num_parts:
        raise PlacementError(
            f"{num_blocks} {what} cannot be shared by {num_parts} ranks: use at most {num_blocks} ranks"
        )
    smaller, num_bigger = divmod(num_blocks, num_parts)
    counts = [smaller + (part < num_bigger) for part in range(num_parts)]
    edges = [min(count * block, size) for count in accumulate(counts, initial=0)]
    return tuple(range(start, stop) for start, stop in pairwise(edges))


@lru_cache(maxsize=4096)
def _largest_block(blocks: tuple[int, ...], size: int, num_parts: int) -> int:
    """The first of the blocks of which each part has one; else 1."""
    return next((block for block in blocks if size > block * (num_parts - 1)), 1)


def tokens_of_a_block(vocab_size: int) -> int:
    """Tokens of a block of a draw: the power of two nearest to the square root of the vocabulary."""
    return 1 << round(math.log2(vocab_size) / 2)


@lru_cache(maxsize=1024)
def vocabulary_parts(vocab_size: int, num_ranks: int) -> tuple[range, ...]:
    """The tokens of each rank; parts begin where blocks of a draw do, if there are enough of these."""
    of_a_draw = tokens_of_a_block(vocab_size)
    block = _largest_block((max(BLOCK, of_a_draw), of_a_draw), vocab_size, num_ranks)
    return split_blocks(vocab_size, num_ranks, block=block, what="tokens of the vocabulary")


@dataclass(frozen=True, kw_only=True)
class HeadShard:
    """The attention heads of one rank: its key-value heads and the query heads that read them."""

    query_heads: range
    kv_heads: range
    num_kv_heads: int  # of all ranks.


def split_heads(*, num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShard, ...]:
    """Split attention heads at the boundaries of key-value groups; PlacementError for too many ranks or uneven groups.

    If there are more ranks than key-value heads, groups are split, and each of their ranks has the key-value head.

        8 heads, 4 kv heads, 3 ranks:  | 0 1 2 3 | 4 5 | 6 7 |     kv  | 0 1 | 2 | 3 |
        4 heads, 2 kv heads, 3 ranks:  | 0 | 1 | 2 3 |             kv  | 0 | 0 | 1 |
    """
    if num_ranks > num_heads:
        raise PlacementError(
            f"{num_heads} attention heads cannot be shared by {num_ranks} ranks: use at most {num_heads} ranks"
        )
    group, remainder = divmod(num_heads, num_kv_heads)
    if remainder:
        raise PlacementError(f"{num_heads} query heads over {num_kv_heads} key-value heads: a multiple is required")
    if num_ranks <= num_kv_heads:
        held = [(_times(part, group), part) for part in split_blocks(num_kv_heads, num_ranks)]
    else:
        held = [
            (_behind(kv_head * group, part), range(kv_head, kv_head + 1))
            for kv_head, ranks in enumerate(split_blocks(num_ranks, num_kv_heads))
            for part in split_blocks(group, len(ranks))
        ]
    return tuple(HeadShard(query_heads=queries, kv_heads=keys, num_kv_heads=num_kv_heads) for queries, keys in held)


class Cut(Enum):
    """Units along which a matrix is split."""

    query_heads = "query heads"
    kv_heads = "key-value heads"
    fused_qkv = "key-value heads, each with its queries, key and value"
    qkv = "query heads, then key heads, then value heads"
    mlp_units = "MLP units"
    gate_up = "gates, then MLP units"
    vocabulary = "vocabulary"


HEAD_CUTS = frozenset({Cut.query_heads, Cut.kv_heads, Cut.fused_qkv, Cut.qkv})
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings")
IN_PARTS = ("qkv_proj", "gate_up_proj")
_MODULES = {
    Cut.query_heads: (
        "q_proj",
        "q_b_proj",
        "kv_b_proj",
        "g_proj",
        "self_attn.gate_proj",
        "dt_proj",
        "o_proj",
        "out_proj",
        "dense",
        "attn.c_proj",
    ),
    Cut.kv_heads: ("k_proj", "v_proj"),
    Cut.fused_qkv: ("query_key_value",),
    Cut.qkv: ("qkv_proj", "attn.c_attn"),
    Cut.gate_up: ("gate_up_proj", "input_linear"),
    Cut.mlp_units: (
        "gate_proj",
        "up_proj",
        "down_proj",
        "dense_h_to_4h",
        "dense_4h_to_h",
        "fc1",
        "fc2",
        "fc_in",
        "fc_out",
        "c_fc",
        "c_proj",
        "w1",
        "w2",
        "w3",
        "output_linear",
    ),
    Cut.vocabulary: (*_EMBEDDINGS, "lm_head"),
}
_CUTS = {module: cut for cut, modules in _MODULES.items() for module in modules}


@lru_cache(maxsize=4096)
def cut_of(module: str) -> Cut:
    """The units that a module's weight is split along, by the end of its name; an unknown one raises PlacementError."""
    try:
        return _CUTS.get(".".join(module.split(".")[-2:])) or _CUTS[module.rpartition(".")[2]]
    except KeyError:
        raise PlacementError(f"no rule says how to cut {module} over ranks: run this model on one rank") from None


def stays_whole(module: str, whole: WholeParts) -> bool:
    """Whether every rank holds all of a module that would be cut otherwise; raises as `cut_of`."""
    is_embedding = module.rpartition(".")[2] in _EMBEDDINGS
    return (is_embedding and whole is not WholeParts.none) or (
        cut_of(module) in HEAD_CUTS and whole is WholeParts.attention
    )


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """One rank's part of a model: attention heads, and nearly equal parts of MLP units and of the vocabulary.

    Units are cut in the first of `even_blocks` that gives ranks as many of them, else in the first of `blocks` that
    there are enough of. Heads are as wide as the `num_heads` of all ranks make a matrix. With `spreads_experts` this
    rank has whole experts.
    """

    rank: int
    num_ranks: int
    heads: HeadShard
    num_heads: int
    blocks: tuple[int, ...]
    even_blocks: tuple[int, ...] = ()
    spreads_experts: bool = False

    def own_experts(self, num_experts: int) -> range:
        """The experts of a rank that has whole ones."""
        return range(self.rank, num_experts, self.num_ranks)

    def features(self, cut: Cut, size: int) -> tuple[range, ...]:
        """The rows (column-parallel) or columns (row-parallel) that this rank holds of a matrix with `size` of them."""
        num_heads, num_kv_heads = self.num_heads, self.heads.num_kv_heads
        match cut:
            case Cut.query_heads | Cut.kv_heads:
                of_queries, of_keys = (self.heads.query_heads, num_heads), (self.heads.kv_heads, num_kv_heads)
                own, number = of_queries if cut is Cut.query_heads else of_keys
                return (_times(own, size // number),)
            case Cut.fused_qkv:
                return self._fused(size // (num_heads + 2 * num_kv_heads), num_heads // num_kv_heads)
            case Cut.qkv:
                dim = size // (num_heads + 2 * num_kv_heads)
                queries, keys = _times(self.heads.query_heads, dim), _times(self.heads.kv_heads, dim)
                return queries, _behind(num_heads * dim, keys), _behind((num_heads + num_kv_heads) * dim, keys)
            case Cut.gate_up:
                (units,) = self.features(Cut.mlp_units, size // 2)
                return units, _behind(size // 2, units)
            case Cut.vocabulary:
                return (vocabulary_parts(size, self.num_ranks)[self.rank],)
            case Cut.mlp_units:
                even = (block for block in self.even_blocks if size % (block * self.num_ranks) == 0)
                block = next(even, _largest_block(self.blocks, size, self.num_ranks))
                return (split_blocks(size, self.num_ranks, block=block, what="units of an MLP")[self.rank],)

    def _fused(self, dim: int, group: int) -> tuple[range, ...]:
        """The features of own heads in [key-value head][`group` queries, key, value][`dim`]."""
        own, keys = self.heads.query_heads, self.heads.kv_heads
        if len(own) == group * len(keys):
            return (_times(keys, (group + 2) * dim),)
        first = 2 * dim * keys.start  # keys and values of the heads before the one head, some of whose queries are here
        return _behind(first, _times(own, dim)), _behind(first + group * dim * (keys.start + 1), range(2 * dim))

    def num_of(self, num_units: int) -> int:
        """Number of units that this rank holds, of `num_units` that are cut one by one."""
        return len(split_blocks(num_units, self.num_ranks, what="heads of a recurrent layer")[self.rank])

    def num_features(self, cut: Cut, size: int) -> int:
        """The number of them."""
        return sum(map(len, self.features(cut, size)))


def _times(units: range, width: int) -> range:
    return range(units.start * width, units.stop * width)


def _behind(start: int, part: range) -> range:
    return range(start + part.start, start + part.stop)


def split_model(
    shape: ModelShape, *, num_ranks: int, quantization: str = NO_QUANTIZATION, whole: WholeParts = WholeParts.none
) -> tuple[RankShard, ...]:
    """Split a model over the ranks of a tensor-parallel group; PlacementError for more ranks than units of a kind.

    MLP units and vocabulary are split in blocks of 64, or of larger groups of the quantization, if there are enough.
    Where attention stays whole, every rank has all heads. Experts that are spread must be as many on every rank.
    """
    if shape.spreads_experts and (not shape.num_experts or shape.num_experts % num_ranks):
        raise PlacementError(
            f"placement.target.experts=spread gives each of {num_ranks} ranks as many whole experts, and a layer of "
            f"the target has {shape.num_experts or 'none'}: use placement.target.experts=cut, or ranks that divide them"
        )
    num_heads, num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if whole is WholeParts.attention:
        every = HeadShard(query_heads=range(num_heads), kv_heads=range(num_kv_heads), num_kv_heads=num_kv_heads)
        heads = (every,) * num_ranks
    else:
        heads = split_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, num_ranks=num_ranks)
    storage = format_of(quantization)
    blocks = tuple(math.lcm(BLOCK, group) for group in storage.packing.groups) or (BLOCK,)
    shards = tuple(
        RankShard(
            rank=rank,
            num_ranks=num_ranks,
            heads=heads[rank],
            num_heads=num_heads,
            blocks=blocks,
            even_blocks=() if storage.is_quantized else EVEN_BLOCKS,
            spreads_experts=shape.spreads_experts,
        )
        for rank in range(num_ranks)
    )
    for size, cut in ((shape.intermediate_size, Cut.mlp_units), (shape.vocab_size, Cut.vocabulary)):
        shards[0].features(cut, size)  # refuses too many ranks
    return shards


def check_inputs(
    quantization: str,
    name: str,
    widths: Collection[int],
    *,
    group: int,
    is_cut: bool,
    num_ranks: int,
    is_stored: bool,
    num_experts: int = 0,
) -> None:
    """Raise PlacementError if a number of inputs of a layer, or of its slices, is no multiple of a packed group.

    `widths` are the ranks' if they share the inputs (`is_cut`); `is_stored` says that files hold the quantized weights.
    A layer of `num_experts` may have whole ones on each rank.
    """
    if odd := [width for width in widths if width % group]:
        where, remedy = (f" on one of {num_ranks} ranks", "another number of ranks, or ") if is_cut else ("", "")
        if is_cut and num_experts and num_experts % num_ranks == 0:
            remedy = f"placement.target.experts=spread, {remedy}"
        other = "an unquantized checkpoint" if is_stored else f"quantization={easiest_format()}"
        raise PlacementError(
            f"{quantization} packs {group} inputs at a time, and {name} has {min(odd)}{where}: use {remedy}{other}"
        )


def check_experts(shards: Sequence[RankShard], num_units: int, *, value_bytes: int) -> None:
    """Raise PlacementError if a GPU's products of all experts, as torch has them, cannot read some rank's units."""
    held = {shard.num_features(Cut.mlp_units, num_units) for shard in shards if not shard.spreads_experts}
    if odd := [units for units in held if units * value_bytes % _GROUPED_BYTES]:
        raise PlacementError(
            f"experts of {num_units} units have {min(odd)} on one of {len(shards)} ranks, and GPUs multiply by "
            f"multiples of {_GROUPED_BYTES // value_bytes}: use another number of ranks, or "
            "placement.target.experts=spread"
        )


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One weight matrix (outputs x inputs, or token ids x width) as the library stores it, or a slice of it.

    `module` is the last part of the module's name, `cut` the dimension that is sharded, None for no dimension. A layer
    has `copies` of it in the mean, as one for each expert; a token uses `num_chosen` of them, 0 for all. Each of
    `num_sharers` ranks may have as many copies of its own. A slice is of a matrix with `whole_columns`.
    """

    module: str
    num_rows: int
    num_columns: int
    cut: int | None = None
    has_bias: bool = False
    copies: float = 1.0
    num_chosen: float = 0.0
    whole_columns: int = 0
    num_sharers: int = 1
    num_units: int = 0  # heads of a recurrence, which ranks share; 0 where the module's name says how it is cut.
    is_plain: bool = False  # kept in the model's number format, whatever the storage format and the device.
    name: str = ""  # of the module in the library, with `*` for the number of the layer.
    is_kept: bool = False  # not quantized in files whose other matrices are.

    def named(self, layer: int) -> str:
        """The name of the module in a layer."""
        return self.name.replace("*", str(layer), 1)

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of all copies, without the bias."""
        return round(self.copies * self.num_rows * self.num_columns)

    def num_used(self, num_tokens: float) -> float:
        """Copies that any of `num_tokens` uses; with several `num_sharers`, on the rank where most are used."""
        if not self.num_chosen:
            return self.copies
        mean = distinct(self.copies, self.num_chosen, num_tokens)
        if self.num_sharers == 1:
            return mean
        number = max(round(self.copies), 1)
        return self.copies / number * most_of(self.num_sharers, number, mean / self.copies)

    def of_rank(self, shard: RankShard) -> "Matrix":
        """The slice that a rank holds."""
        if self.num_chosen and shard.spreads_experts:
            share = 1 / shard.num_ranks
            return replace(
                self, copies=share * self.copies, num_chosen=share * self.num_chosen, num_sharers=shard.num_ranks
            )
        if self.cut is None:
            return self
        size = self.num_columns if self.cut else self.num_rows
        if self.num_units:
            width = size // self.num_units * shard.num_of(self.num_units)
        else:
            width = shard.num_features(cut_of(self.module), size)
        rows, columns = (width, self.num_columns) if self.cut == 0 else (self.num_rows, width)
        return replace(self, num_rows=rows, num_columns=columns, whole_columns=self.num_columns)


def distinct(num_experts: float, num_chosen: float, num_tokens: float) -> float:
    """Expected experts that any of `num_tokens` chooses, if each token chooses `num_chosen` evenly, on its own.

    Source: arXiv:2506.20675.
    """
    left_out: float = (1 - num_chosen / num_experts) ** num_tokens
    return num_experts * (1 - left_out)


def most_of(num_ranks: int, number: int, chance: float) -> float:
    """Expected largest number of successes on any rank, if each has `number` independent trials."""
    at_most = accumulate(
        math.comb(number, count) * chance**count * (1 - chance) ** (number - count) for count in range(number)
    )
    return sum(1 - share**num_ranks for share in at_most)


@dataclass(frozen=True, kw_only=True)
class KeptStates:
    """The states of some layers: each keeps, of a row, inputs of a convolution over `width` tokens, and a state.

    Of a layer without a state `num_values` is 0. Ranks share `num_units` heads of it; 0 leaves it whole on each.
    """

    num_units: int = 0
    num_layers: int
    num_channels: int
    width: int
    num_values: int

    def of_rank(self, shard: RankShard) -> "KeptStates":
        """The part of a rank."""
        if not self.num_units:
            return self
        own = shard.num_of(self.num_units)
        channels, values = (size * own // self.num_units for size in (self.num_channels, self.num_values))
        return replace(self, num_channels=channels, num_values=values)

    def row_bytes(self, num_kept: int, *, value_bytes: int) -> int:
        """Bytes of all layers for a row that keeps the states after its last `num_kept` tokens."""
        state_bytes = STATE_VALUE_BYTES * num_kept * self.num_values
        return self.num_layers * (state_bytes + value_bytes * kept_inputs(num_kept, self.width) * self.num_channels)


FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up")
"""Modules with one input, which one product computes."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All parameters of a model, or the parameters on one rank."""

    layer: tuple[Matrix, ...]  # matrices of each layer, which quantization applies to.
    layer_vectors: int  # elements of the norms of each layer, whole on every rank.
    embeddings: tuple[Matrix, ...]  # lookup tables.
    head: Matrix | None  # the output matrix; None if it is tied to the embedding.
    final_vectors: int  # elements of the last norm.
    num_layers: int
    # of a token in all layers, where a cache may keep other values than the shape's heads; None where it keeps theirs.
    cached_values: int | None = None
    states: tuple[KeptStates, ...] = ()  # of recurrent layers.
    scores: bool = True  # it makes the logits, as all parts but earlier layers do.
    each: tuple["Inventory", ...] = field(default=(), compare=False)  # the layers by themselves, where they differ,
    sizes: tuple[int, ...] = ()  # and the parameters of each over all ranks, which tell models in another order apart.

    def __hash__(self) -> int:
        """Equal inventories have equal hashes."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.layer, self.embeddings, self.num_layers, self.layer_vectors, self.final_vectors, self.scores))

    @cached_property
    def matrix_sizes(self) -> Mapping[int, int]:
        """Numbers of matrices of a layer by their number of elements."""
        return Counter(one.num_elements for one in self.layer if not (one.num_chosen or one.is_plain or one.is_kept))

    @cached_property
    def kept_sizes(self) -> Mapping[int, int]:
        """The same of the matrices that quantized files leave as they are."""
        return Counter(one.num_elements for one in self.layer if one.is_kept and not (one.num_chosen or one.is_plain))

    @cached_property
    def plain_elements(self) -> int:
        """Elements of the matrices of a layer that are kept in the model's number format."""
        return sum(matrix.num_elements for matrix in self.layer if matrix.is_plain)

    @cached_property
    def experts(self) -> tuple[Matrix, ...]:
        """The matrices of a layer that stand for one of each expert."""
        return tuple(matrix for matrix in self.layer if matrix.num_chosen)

    @cached_property
    def products(self) -> tuple[int, ...]:
        """Elements of each matrix product of a layer; matrices with the same input are fused into one."""
        sizes = Counter[str]()
        for matrix in self.layer:
            if not matrix.num_chosen:
                sizes[FUSED.get(matrix.module, matrix.module)] += matrix.num_elements
        return tuple(sizes.values())

    @property
    def output(self) -> Matrix:
        """The matrix that makes the logits."""
        return self.head or self.embeddings[0]

    @cached_property
    def num_all_reduces(self) -> int:
        """All-reduces of a forward under tensor parallelism: after each row-parallel matrix and a cut embedding."""
        has_cut_embedding = any(table.cut is not None for table in self.embeddings)
        if self.each:
            return sum(layer.num_all_reduces for layer in self.each) + has_cut_embedding
        return self.num_layers * len({matrix.module for matrix in self.layer if matrix.cut == 1}) + has_cut_embedding

    @property
    def parts(self) -> tuple["Inventory", ...]:
        """Each layer and what stands outside of them, where layers differ; else all in one."""
        if not self.each:
            return (self,)
        outer = replace(
            self, layer=(), layer_vectors=0, final_vectors=self.outer_vectors, num_layers=0, states=(), each=()
        )
        return *self.each, outer

    @property
    def outer_vectors(self) -> int:
        """Elements of norms outside of the layers; `final_vectors` also has what their mean leaves."""
        in_mean = self.num_layers * self.layer_vectors
        return self.final_vectors + (in_mean - sum(layer.layer_vectors for layer in self.each) if self.each else 0)

    def keeping(self, whole: WholeParts) -> "Inventory":
        """The parameters with some of them not to be cut; each rank then has its slice of a tied head as a copy."""

        def kept(matrix: Matrix) -> Matrix:
            is_cut = matrix.cut is not None and bool(matrix.num_units or not stays_whole(matrix.module, whole))
            return matrix if is_cut else replace(matrix, cut=None)

        embeddings, head = tuple(map(kept, self.embeddings)), self.head
        if head is None and embeddings != self.embeddings:
            head = replace(self.embeddings[0], module="lm_head")
        return self._of_each(
            lambda layer: replace(layer, layer=tuple(map(kept, layer.layer))), embeddings=embeddings, head=head
        )

    def leaving(self, names: Collection[str]) -> "Inventory":
        """The parameters of a model whose files do not quantize the modules of these names."""
        each = [
            replace(layer, layer=tuple(replace(one, is_kept=one.named(number) in names) for one in layer.layer))
            for number, layer in enumerate(map(self.by_layer, range(self.num_layers)))
        ]
        return joined(each, final_vectors=self.outer_vectors, embeddings=self.embeddings, head=self.head)

    def without_tables(self, number: int) -> "Inventory":
        """The parameters without the embeddings, and of two tables without the output, which another model has."""
        return replace(self, embeddings=(), head=self.output if number == 1 else None) if number else self

    @property
    def num_parameters(self) -> int:
        """Number of parameters, biases and norms included."""
        tables = [*self.embeddings, *([self.head] if self.head else [])]
        biases = sum(matrix.num_rows for matrix in self.layer if matrix.has_bias)
        of_layer = sum(matrix.num_elements for matrix in self.layer) + self.layer_vectors + biases
        layers = sum(layer.num_parameters for layer in self.each) if self.each else self.num_layers * of_layer
        head = sum(table.num_elements + table.num_rows * table.has_bias for table in tables)
        return layers + head + self.outer_vectors

    def of_rank(self, shard: RankShard) -> "Inventory":
        """The parameters of one rank."""
        return self._of_each(
            lambda layer: replace(
                layer,
                layer=tuple(matrix.of_rank(shard) for matrix in layer.layer),
                states=tuple(kept.of_rank(shard) for kept in layer.states),
            ),
            embeddings=tuple(matrix.of_rank(shard) for matrix in self.embeddings),
            head=self.head and self.head.of_rank(shard),
        )

    def _of_each(self, change: Callable[["Inventory"], "Inventory"], **changes: Any) -> "Inventory":
        """The parameters with a change of each layer, and further changes."""
        kinds = {kind: change(kind) for kind in dict.fromkeys(self.each)}
        return replace(change(self), each=tuple(kinds[kind] for kind in self.each), **changes)

    def of_layers(self, layers: range, *, first: bool, last: bool) -> "Inventory":
        """Consecutive layers: the first ones with the embeddings, the last ones with the final norm and the head."""
        tied = None if first or self.head else replace(self.embeddings[0], module="lm_head")
        tables: dict[str, Any] = {"embeddings": self.embeddings if first else (), "scores": last}
        tables["head"] = (self.head or tied) if last else None
        last_vectors = self.outer_vectors if last else 0
        if not layers:  # of a device without any
            values = None if self.cached_values is None else 0
            none: dict[str, Any] = {"num_layers": 0, "cached_values": values, "states": (), "each": ()}
            return replace(self, final_vectors=last_vectors, **none, **tables)
        return joined([self.by_layer(number) for number in layers], final_vectors=last_vectors, **tables)

    def by_layer(self, number: int) -> "Inventory":
        """One of the layers, without what stands outside of them."""
        if self.each:
            return self.each[number]
        values = None if self.cached_values is None else self.cached_values // self.num_layers
        states = tuple(replace(kept, num_layers=1) for kept in self.states)
        return replace(
            self, embeddings=(), head=None, final_vectors=0, num_layers=1, cached_values=values, states=states
        )


def joined(each: Sequence[Inventory], *, final_vectors: int = 0, **others: Any) -> Inventory:
    """The inventory of consecutive layers: counted in their mean, and if they differ with `each` of them.

    `final_vectors` are the elements outside of the layers, `others` further fields.
    """
    number, counts = len(each), Counter(each)
    copies, states = Counter[Matrix](), Counter[KeptStates]()
    for kind, of_kind in counts.items():
        for matrix in kind.layer:
            copies[matrix] += of_kind
        for kept in kind.states:
            states[replace(kept, num_layers=1)] += of_kind * kept.num_layers
    layer = (
        matrix
        if count == number
        else replace(matrix, copies=matrix.copies * count / number, num_chosen=matrix.num_chosen * count / number)
        for matrix, count in copies.items()
    )
    of_layer, rest = divmod(sum(kind.layer_vectors * count for kind, count in counts.items()), number)
    values = [kind.cached_values for kind in each]
    fields: dict[str, Any] = {
        "layer": tuple(layer),
        "layer_vectors": of_layer,
        "final_vectors": final_vectors + rest,
        "num_layers": number,
        "cached_values": None if None in values else sum(value or 0 for value in values),
        "states": tuple(replace(kept, num_layers=count) for kept, count in states.items()),
        "each": tuple(each) if len(counts) > 1 else (),
        "sizes": tuple(kind.num_parameters for kind in each) if len(counts) > 1 else (),
    }
    return Inventory(**fields | others)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


def decoder(
    shape: ModelShape,
    modules: Sequence[str] = (*ATTENTION, *GATED),
    *,
    biased: Collection[str] = (),
    norms: int = 2,
    final_norms: int = 1,
    head_norms: int = 0,
    routes_by_bias: bool = False,
    names: Collection[tuple[str, str]] = (),
) -> Inventory:
    """List the parameters of a decoder with grouped-query attention and one MLP in each layer, such as Llama.

    Args:
        shape: of the model.
        modules: the matrices of a layer.
        biased: the modules with a bias.
        norms: vectors of the model's width in a layer.
        final_norms: and after the last layer.
        head_norms: vectors of the head dim in a layer.
        routes_by_bias: experts have a bias each that they are chosen by.
        names: parts of a Llama's names, and what the library has in their place.
    """
    width, units = shape.hidden_size, shape.intermediate_size
    queries, keys = (number * shape.head_dim for number in (shape.num_attention_heads, shape.num_key_value_heads))
    outputs = {
        "q_proj": queries,
        **dict.fromkeys(("k_proj", "v_proj"), keys),
        "qkv_proj": queries + 2 * keys,
        "query_key_value": 3 * queries,
        "gate_up_proj": 2 * units,
    }
    layer = []
    for name in modules:
        rows, columns, cut = outputs.get(name, units), width, 0
        if name in _OF_HEADS or name == modules[-1]:
            rows, columns, cut = width, queries if name in _OF_HEADS else units, 1
        part = "self_attn" if _CUTS[name] in HEAD_CUTS else "mlp"
        layer.append(
            Matrix(
                module=name,
                num_rows=rows,
                num_columns=columns,
                cut=cut,
                has_bias=name in biased,
                name=_named(f"{part}.{name}", names),
            )
        )
    table = Matrix(module="embed_tokens", num_rows=shape.vocab_size, num_columns=width, cut=0)
    head = None if shape.tie_word_embeddings else replace(table, module="lm_head", has_bias="lm_head" in biased)
    found = Inventory(
        layer=tuple(layer),
        layer_vectors=norms * width + head_norms * shape.head_dim,
        embeddings=(table,),
        head=head,
        final_vectors=final_norms * width,
        num_layers=shape.num_hidden_layers,
    )
    return _with_experts(found, shape, names, routes_by_bias=routes_by_bias) if shape.num_experts else found


def _named(name: str, parts: Collection[tuple[str, str]]) -> str:
    return reduce(lambda found, part: found.replace(*part), parts, f"model.layers.*.{name}")


def _with_experts(
    dense: Inventory, shape: ModelShape, names: Collection[tuple[str, str]], *, routes_by_bias: bool
) -> Inventory:
    """The parameters of a model whose MLPs are experts after its first layers, with a router and perhaps an MLP."""
    width, num_dense, layer = shape.hidden_size, shape.num_dense_layers, dense.by_layer(0)

    def both(name: str, units: int, *, copies: float = 1, num_chosen: float = 0) -> list[Matrix]:
        return [
            Matrix(
                module=f"{name}.{module}",
                num_rows=rows,
                num_columns=columns,
                cut=cut,
                copies=copies,
                num_chosen=num_chosen,
                name=_named(f"mlp.{name}.{module}", names),
            )
            for module, rows, columns, cut in (("gate_up_proj", 2 * units, width, 0), ("down_proj", width, units, 1))
        ]

    experts = both(
        "experts", shape.moe_intermediate_size, copies=shape.num_experts, num_chosen=shape.num_experts_per_tok
    )
    shared = both("shared_experts", units) if (units := shape.shared_intermediate_size) else []
    attention = [matrix for matrix in dense.layer if _CUTS[matrix.module] in HEAD_CUTS]
    router = shape.num_experts * (width + routes_by_bias)  # never quantized
    chosen = replace(layer, layer=(*attention, *experts, *shared), layer_vectors=layer.layer_vectors + router)
    each = [layer] * num_dense + [chosen] * (shape.num_hidden_layers - num_dense)
    others = {name: getattr(dense, name) for name in ("embeddings", "head", "final_vectors")}
    return joined(each, **others)


_OF_HEADS = ("o_proj", "out_proj", "dense")
"""Matrices after attention."""
