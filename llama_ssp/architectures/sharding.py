"""Who holds what: the slice of every matrix that one rank of a tensor-parallel group keeps.

Pure integers, so that the loader, which reads the slices, and a planner, which counts their bytes, cannot disagree. It
knows no tensors, and it does not say which matrices are cut at all: that is the model's own `tp_plan`.

Shapes: H query heads, N key-value heads, D head dim, R ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from llama_ssp.config.formats.format import format_of
from llama_ssp.config.schema import ModelShape
from llama_ssp.errors import PlacementError

# Widths that stay multiples of 64 suit matrix units, and nf4 packs its weights in groups of 64.
BLOCK = 64


def split_blocks(size: int, num_parts: int, *, block: int = 1) -> tuple[range, ...]:
    """Cut `size` units into consecutive, nearly even parts, the biggest first.

    Args:
        size: how many units there are.
        num_parts: how many parts are wanted.
        block: parts begin at multiples of it; only the last one may end elsewhere.

    Raises:
        PlacementError: there are fewer blocks than parts.
    """
    num_blocks = -(-size // block)
    if num_blocks < num_parts:
        message = f"{num_blocks} blocks cannot be shared by {num_parts} ranks: use at most {num_blocks} ranks"
        raise PlacementError(message)
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
    """Share attention heads out at the borders of key-value groups.

    Only when ranks outnumber key-value heads is a group cut; each of its ranks then holds a copy of its key-value head.

        8 heads, 4 kv heads, 3 ranks:  | 0 1 2 3 | 4 5 | 6 7 |     kv  | 0 1 | 2 | 3 |
        4 heads, 2 kv heads, 3 ranks:  | 0 | 1 | 2 3 |             kv  | 0 | 0 | 1 |

    Raises:
        PlacementError: there are more ranks than heads, or groups of different sizes.
    """
    if num_ranks > num_heads:
        message = f"{num_heads} attention heads cannot be shared by {num_ranks} ranks: use at most {num_heads} ranks"
        raise PlacementError(message)
    group, remainder = divmod(num_heads, num_kv_heads)
    if remainder:
        message = f"{num_heads} query heads over {num_kv_heads} key-value heads: a multiple is required"
        raise PlacementError(message)
    if num_ranks <= num_kv_heads:
        return tuple(
            HeadShard(query_heads=range(part.start * group, part.stop * group), kv_heads=part)
            for part in split_blocks(num_kv_heads, num_ranks)
        )
    return tuple(
        HeadShard(
            query_heads=range(kv_head * group + part.start, kv_head * group + part.stop),
            kv_heads=range(kv_head, kv_head + 1),
        )
        for kv_head, ranks in enumerate(split_blocks(num_ranks, num_kv_heads))
        for part in split_blocks(group, len(ranks))
    )


class Cut(Enum):
    """What a matrix is cut along."""

    query_heads = "query heads"
    kv_heads = "key-value heads"
    fused_qkv = "heads, each with its query, key and value"
    mlp_units = "MLP units"
    vocabulary = "vocabulary"


_CUTS = {
    "q_proj": Cut.query_heads,
    "k_proj": Cut.kv_heads,
    "v_proj": Cut.kv_heads,
    "o_proj": Cut.query_heads,
    "out_proj": Cut.query_heads,
    "query_key_value": Cut.fused_qkv,
    "dense": Cut.query_heads,
    "gate_proj": Cut.mlp_units,
    "up_proj": Cut.mlp_units,
    "down_proj": Cut.mlp_units,
    "dense_h_to_4h": Cut.mlp_units,
    "dense_4h_to_h": Cut.mlp_units,
    "fc1": Cut.mlp_units,
    "fc2": Cut.mlp_units,
    "c_fc": Cut.mlp_units,
    "c_proj": Cut.mlp_units,
    "embed_tokens": Cut.vocabulary,
    "wte": Cut.vocabulary,
    "lm_head": Cut.vocabulary,
}


def cut_of(module: str) -> Cut:
    """What a module's weight is cut along, by the last component of its name.

    Raises:
        PlacementError: there is no rule for this name.
    """
    try:
        return _CUTS[module.rpartition(".")[2]]
    except KeyError:
        message = f"no rule says how to cut {module} over ranks: run this model on one rank"
        raise PlacementError(message) from None


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """What one rank holds of a whole model.

    Attributes:
        heads: its attention heads.
        head_dim: size of each head.
        mlp_units: its units of every MLP.
        vocabulary: its token ids, in the embedding and in the output head.
    """

    heads: HeadShard
    head_dim: int
    mlp_units: range
    vocabulary: range

    def features(self, cut: Cut) -> range:
        """The rows (column-parallel) or columns (row-parallel) of a matrix that this rank holds.

        A fused query-key-value matrix of GPT-NeoX is laid out `[head][q, k, v][dim]`, so its slice is contiguous too.
        """
        match cut:
            case Cut.query_heads:
                return _scaled(self.heads.query_heads, self.head_dim)
            case Cut.kv_heads:
                return _scaled(self.heads.kv_heads, self.head_dim)
            case Cut.fused_qkv:
                return _scaled(self.heads.query_heads, 3 * self.head_dim)
            case Cut.mlp_units:
                return self.mlp_units
            case Cut.vocabulary:
                return self.vocabulary


def _scaled(units: range, width: int) -> range:
    return range(units.start * width, units.stop * width)


def split_model(shape: ModelShape, *, num_ranks: int) -> tuple[RankShard, ...]:
    """What each rank of a tensor-parallel group holds.

    MLP units and vocabulary are cut in blocks of 64 where there are enough of them.

    Raises:
        PlacementError: there are more ranks than heads, MLP units or token ids.
    """
    heads = split_heads(
        num_heads=shape.num_attention_heads, num_kv_heads=shape.num_key_value_heads, num_ranks=num_ranks
    )
    units, vocabulary = (
        split_blocks(size, num_ranks, block=BLOCK if size > BLOCK * (num_ranks - 1) else 1)
        for size in (shape.intermediate_size, shape.vocab_size)
    )
    return tuple(
        RankShard(heads=heads[rank], head_dim=shape.head_dim, mlp_units=units[rank], vocabulary=vocabulary[rank])
        for rank in range(num_ranks)
    )


def widths(shards: Sequence[RankShard], cut: Cut) -> tuple[int, ...]:
    """How many features each rank holds."""
    return tuple(len(shard.features(cut)) for shard in shards)


def check_deepspeed(shape: ModelShape, quantization: str, *, num_ranks: int) -> None:
    """Refuse what DeepSpeed does not share: it gives every rank the same heads, whole key-value groups of them.

    Raises:
        PlacementError: the heads do not divide, with the numbers of ranks that would work; or layers are quantized.
    """
    if format_of(quantization).is_quantized:
        message = (
            f"placement.target.kind=deepspeed cuts unquantized layers, and model.quantization={quantization} was "
            "given: use model.quantization=none, or placement.target.kind=tensor"
        )
        raise PlacementError(message)
    num_kv_heads = shape.num_key_value_heads
    if num_kv_heads % num_ranks:
        sizes = [size for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0]
        message = (
            f"placement.target.kind=deepspeed shares {num_kv_heads} key-value heads out evenly, and {num_ranks} ranks "
            f"were given: use {', '.join(map(str, sizes))} ranks, or placement.target.kind=tensor"
        )
        raise PlacementError(message)
