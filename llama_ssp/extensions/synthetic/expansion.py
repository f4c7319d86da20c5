"""Embeds a small Llama in a larger Llama shape, so that the large model computes the same function.

A matrix of the large model is one gather of a small one, so that any slice can be made without the rest:

    large[r, c] = scale * small[rows[r], columns[c]] * weights[c]        0 if an index is SPARE

The indices and factors:

    residual    concatenated copies of the small hidden state; readers use the first copy, writers write all copies
    heads, MLP  copies of the small ones, each of which contributes a part of the output, so that every rank has a part
    layers      the small ones, spread evenly; in between, layers whose contributions cancel, but not within a rank
    vocabulary  a token that the small model lacks gets a large negative logit from the last residual dimension alone
    taps        of a draft head: layers with the inputs of the small one's taps, so its matrices are gathered alike

Factors are powers of two if the shapes allow it, so that the large matrices hold the small numbers exactly in any
dtype. Weights are read in `source`. Shapes: O rows and I columns of the large matrix; a norm is a single row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.catalogue import NUM_TAPS, ModelShape

SPARE = -1
_LOWEST, _LIFT = -(2.0**14), 32.0


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Recipe of a large matrix from a small one."""

    source: str  # name of the small tensor.
    rows_O: Tensor  # indices of the small rows; SPARE for none.
    columns_I: Tensor  # of the columns.
    weights_I: Tensor | None = None  # factor of each column, a signed power of two, or 0; None for 1.
    scale: float = 1.0  # factor of all numbers.
    last_column: tuple[float, float] | None = None  # its value in rows with an index, and in spare rows; None: not set.

    def cut(self, dim: int, parts: Sequence[range]) -> "Gather":
        """Keep some of the rows (dim 0) or of the columns (dim 1), in the order of `parts`."""
        if dim == 0:
            return replace(self, rows_O=_kept(self.rows_O, parts))
        assert self.last_column is None, "matrices with a last column are cut by rows"
        weights_I = None if self.weights_I is None else _kept(self.weights_I, parts)
        return replace(self, columns_I=_kept(self.columns_I, parts), weights_I=weights_I)

    def make(self, small: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Make the matrix, on the device of the small one.

        Memory: the result, and its distinct rows once. The small numbers are rounded to `dtype` before they are copied,
        so that all copies of a number are equal.
        """
        device = small.device
        distinct, rows_O = self.rows_O.unique(return_inverse=True)
        padded = functional.pad(small * self.scale, (0, 1, 0, 1)).to(dtype)  # zeros at index SPARE
        spread = padded[distinct.to(device)].index_select(1, self.columns_I.remainder(padded.shape[1]).to(device))
        if self.weights_I is not None:
            spread.mul_(self.weights_I.to(device, dtype))
        if self.last_column is not None:
            taken, spare = self.last_column
            spread[:, -1] = torch.where(distinct == SPARE, spare, taken).to(device, dtype)
        return spread.index_select(0, rows_O.to(device))


def _kept(values: Tensor, parts: Sequence[range]) -> Tensor:
    return torch.cat([values[part.start : part.stop] for part in parts])


def shares(count: int) -> list[float]:
    """`count` powers of two with the sum 1."""
    power = 1 << (count.bit_length() - 1)
    num_halved = count - power
    return [1 / power] * (power - num_halved) + [0.5 / power] * (2 * num_halved)


def cancelling(count: int) -> list[float]:
    """`count` signed powers of two with the sum 0, but no partial run with the sum 0; a single one is 0."""
    return [0.0] if count == 1 else [1.0, *(-share for share in shares(count - 1))]


def obstacle(small: ModelShape, large: ModelShape) -> str | None:
    """The reason why a shape cannot hold a small model, or None."""
    least = {
        "num_hidden_layers": small.num_hidden_layers,
        "hidden_size": small.hidden_size + _has_spare_tokens(small, large),
        "head_dim": small.head_dim,
        "intermediate_size": small.intermediate_size,
        "vocab_size": small.vocab_size,
        "num_key_value_heads": len(_head_groups(small, large)),
    }
    for name, value in least.items():
        if getattr(large, name) < value:
            return f"{name} is {getattr(large, name)}, and at least {value} is required"
    if large.tie_word_embeddings and not small.tie_word_embeddings:
        return "its embeddings are tied"
    if large.vocab_size > small.vocab_size and not _has_spare_tokens(small, large):
        return f"vocab_size is {large.vocab_size}, and {small.vocab_size} of {large.num_token_ids} tokens are drafted"
    return None


def _has_spare_tokens(small: ModelShape, large: ModelShape) -> bool:
    """Whether the large model reads tokens that the small one lacks, which takes a dimension of the residual."""
    return large.num_token_ids > small.num_token_ids


def _head_groups(small: ModelShape, large: ModelShape) -> list[range]:
    """The small query heads, in groups that can share one large key-value head."""
    small_group = small.num_attention_heads // small.num_key_value_heads
    large_group = large.num_attention_heads // large.num_key_value_heads
    return [
        range(start, min(start + large_group, first + small_group))
        for first in range(0, small.num_attention_heads, small_group)
        for start in range(first, first + small_group, large_group)
    ]


def _copies(sources: Sequence[int], parts: Callable[[int], list[float]]) -> tuple[Tensor, Tensor]:
    """The sources, and the weight of each of the copies of a source."""
    places: dict[int, list[int]] = {}
    for place, source in enumerate(sources):
        places.setdefault(source, []).append(place)
    weights = torch.zeros(len(sources))
    for where in places.values():
        weights[where] = torch.tensor(parts(len(where)))
    return torch.tensor(sources), weights


class Implant:
    """A small Llama or draft head, with its `rms_norm_eps` and rotary base, in a large shape without `obstacle`.

    `eps` and `theta` are the large model's; `layers` has for each large layer the index of the small one that it
    copies, and whether it contributes.
    """

    def __init__(self, small: ModelShape, large: ModelShape, *, small_eps: float, small_theta: float) -> None:
        assert obstacle(small, large) is None
        self._small, self._large = small, large
        self._reserved = _has_spare_tokens(small, large)
        self._num_copies = _num_copies(small.hidden_size, large.hidden_size - self._reserved, large.hidden_size)
        self._spread = math.sqrt(self._num_copies * small.hidden_size / large.hidden_size)
        self._gain = 2.0 ** round(-math.log2(self._spread))
        budget = (self._gain * self._spread) ** 2 * small_eps
        # The reserved dimension adds its mean square to every token's; eps supplies the rest of the budget.
        self._constant = 2.0 ** math.floor(math.log2(0.75 * budget * large.hidden_size) / 2) if self._reserved else 0.0
        self.eps = budget - self._constant**2 / large.hidden_size
        self._pairs, self.theta = _rotary(small.head_dim, large.head_dim, theta=small_theta)
        num_small, num_large = small.num_hidden_layers, large.num_hidden_layers
        starts = [layer * num_large // num_small for layer in range(num_small)]
        self.layers = [
            (max(place for place, start in enumerate(starts) if start <= layer), layer in starts)
            for layer in range(num_large)
        ]
        self._maps = {counts: self._layer_maps(counts=counts) for counts in (True, False)}

    def gather(self, name: str) -> Gather:
        """Return how the large tensor of this name is made from a small one."""
        if name.startswith("model.layers."):
            return self._layer_gather(name)
        if name == "model.fc.weight":
            return self._taps_gather(name)
        is_tied = self._large.tie_word_embeddings
        if name == "model.norm.weight":
            return self._norm(name, scale=self._spread / (self._gain * self._num_copies if is_tied else 1), last=_LIFT)
        vocabulary = torch.arange(self._large.vocab_size)
        vocabulary[self._small.vocab_size :] = SPARE
        if name == "model.embed_tokens.weight":
            columns, scale = self._residual(self._num_copies), self._gain
            last = self._constant, _LOWEST if is_tied else 0.0
        else:
            columns, scale, last = self._residual(1), 1.0, (0.0, _LOWEST)
        source = "model.embed_tokens.weight" if self._small.tie_word_embeddings else name
        last_column = last if self._reserved else None
        return Gather(source=source, rows_O=vocabulary, columns_I=columns, scale=scale, last_column=last_column)

    def _layer_gather(self, name: str) -> Gather:
        _, _, number, *rest = name.split(".")
        small_layer, counts = self.layers[int(number)]
        source = ".".join(["model.layers", str(small_layer), *rest])
        (queries, query_weights), keys, (units, unit_weights) = self._maps[counts]
        plain = torch.arange(self._small.head_dim)
        rows_O, columns_I, weights_I, scale = self._residual(self._num_copies), self._residual(1), None, 1.0
        if self._small.is_head and rest[-2] in {"q_proj", "k_proj", "v_proj"}:
            columns_I = self._states(2)
        match rest[-2]:
            case "q_proj":
                rows_O = self._heads(queries, self._pairs)
                scale = math.sqrt(self._large.head_dim / self._small.head_dim)
            case "k_proj":
                rows_O = self._heads(keys, self._pairs)
            case "v_proj":
                rows_O = self._heads(keys, plain)
            case "o_proj":
                columns_I, scale = self._heads(queries, plain), self._gain
                weights_I = query_weights.repeat_interleave(self._large.head_dim)
            case "gate_proj" | "up_proj":
                rows_O = units
            case "down_proj":
                columns_I, weights_I, scale = units, unit_weights, self._gain
            case _:
                return self._norm(source, scale=self._spread, last=0.0)
        return Gather(source=source, rows_O=rows_O, columns_I=columns_I, weights_I=weights_I, scale=scale)

    def _taps_gather(self, name: str) -> Gather:
        """Gather the first matrix of a head: all copies of its hidden state, and the reserved dimension of a tap."""
        rows_O, last_column = self._residual(self._num_copies), None
        if self._reserved:
            rows_O[rows_O == SPARE] = self._small.hidden_size  # after the last row: zeros too, but not SPARE
            rows_O[-1], last_column = SPARE, (0.0, 1.0)
        return Gather(source=name, rows_O=rows_O, columns_I=self._states(NUM_TAPS), last_column=last_column)

    def _norm(self, source: str, *, scale: float, last: float) -> Gather:
        row = torch.zeros(1, dtype=torch.long)
        last_column = (last, last) if self._reserved else None
        return Gather(
            source=source, rows_O=row, columns_I=self._residual(self._num_copies), scale=scale, last_column=last_column
        )

    def _heads(self, sources: Tensor, dims: Tensor) -> Tensor:
        """The small feature of each feature of large heads: small dimension i is a head's dimension dims[i]."""
        head_dim = self._small.head_dim
        features = torch.full((len(sources), self._large.head_dim), SPARE)
        features[:, dims] = sources[:, None] * head_dim + torch.arange(head_dim)
        return features.flatten()

    def _residual(self, num_copies: int) -> Tensor:
        """The small dimension of each dimension of the residual, in its first copies: all to write, one to read."""
        features = torch.full((self._large.hidden_size,), SPARE)
        width = num_copies * self._small.hidden_size
        features[:width] = torch.arange(width) % self._small.hidden_size
        return features

    def _states(self, number: int) -> Tensor:
        """The small dimension of each dimension of `number` hidden states in a row, to read."""
        one = self._residual(1)
        return torch.cat([one.where(one == SPARE, one + place * self._small.hidden_size) for place in range(number)])

    def _layer_maps(self, *, counts: bool) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]:
        """Sources and weights of query heads, sources of key-value heads, and sources and weights of MLP units.

        Of all of them; in a layer that cancels, of only a few, so that each is on many ranks.
        """
        groups = _head_groups(self._small, self._large)
        num_units, num_kv_heads = self._small.intermediate_size, self._large.num_key_value_heads
        if not counts:
            groups, num_units = groups[:1], min(num_units, self._large.intermediate_size // 2)
        parts = shares if counts else cancelling
        chosen = [groups[place % len(groups)] for place in range(num_kv_heads)]
        large_group = self._large.num_attention_heads // num_kv_heads
        query = [heads[place % len(heads)] for heads in chosen for place in range(large_group)]
        small_group = self._small.num_attention_heads // self._small.num_key_value_heads
        units = [unit % num_units for unit in range(self._large.intermediate_size)]
        keys = torch.tensor([heads.start // small_group for heads in chosen])
        return _copies(query, parts), keys, _copies(units, parts)


def _num_copies(small_size: int, room: int, large_size: int) -> int:
    """The number of copies of the hidden state that fit, preferably such that the norms' factor is a power of two."""
    most = room // small_size

    def is_exact(count: int) -> bool:
        quotient, remainder = divmod(large_size, count * small_size)
        return not remainder and math.log2(quotient) % 2 == 0

    return max(filter(is_exact, range(1, most + 1)), default=most)


def _rotary(small_dim: int, large_dim: int, *, theta: float) -> tuple[Tensor, float]:
    """The large dimension of each small one, such that rotary frequencies match, and the large rotary base."""
    step, remainder = divmod(large_dim, small_dim)
    if remainder:
        step, theta = 1, theta ** (large_dim / small_dim)
    first = torch.arange(small_dim // 2) * step
    return torch.cat([first, first + large_dim // 2]), theta
