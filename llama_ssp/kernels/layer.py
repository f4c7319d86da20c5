"""A whole layer in one operator: `cpu.layer`, for a few tokens on one rank, where all its parts are compiled.

The reference is an operator for each part; the bits are the same.

Shapes: M tokens, E width, S slots of all rows, N key-value heads, D head dim, P = D / 2, B rows, T positions of a row,
I inputs, O outputs, W width of a cache's row.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.cpu.kinds import TENSORS
from llama_ssp.cpu.operators import Operator, find_operator
from llama_ssp.kernels.attention import ALL, Attention, find_attention
from llama_ssp.kernels.linear import NativeLinear, sample
from llama_ssp.kernels.rows import SINGLES, KeptRows
from llama_ssp.storage.formats import Product

_CHECKED_WIDTH = 128


class TokenPlaces(NamedTuple):
    """Where the tokens of a forward are; see `attention.Attention`."""

    turns_S1P: Tensor
    positions_BT: Tensor
    slots_M: Tensor
    cache_2NSW: Tensor
    own_slots_BT: Tensor
    sees_BTA: Tensor


class WholeLayer:
    """A layer in one operator, for at most `sizes.WHOLE_LAYER_TOKENS` tokens.

    Args:
        parts: qkv, output, gate and up, down; the first and the third have taken in their norm.
        operator: of their kind and the heads' size.
    """

    def __init__(self, parts: Sequence[NativeLinear], operator: Operator) -> None:
        self._operator = operator
        self._weights = [tensor for part in parts for tensor in part.operands]
        self._least_squares = parts[0].least_square, parts[2].least_square

    def __call__(self, x_ME: Tensor, place: TokenPlaces, *, num_heads: int, scale: float, window: int) -> Tensor:
        """The residual stream behind the layer; writes keys and values of the tokens."""
        return self._operator(x_ME, *place, *self._weights, *self._least_squares, num_heads, scale, window)


def whole_layer(parts: Sequence[NativeLinear | None], head_dim: int, rows: KeptRows = SINGLES) -> WholeLayer | None:
    """The layer of these parts; None if they are not all of one kind, or if this machine has no operator for it."""
    found = [part for part in parts if part]
    if len(found) < len(parts) or len({part.product for part in found}) > 1:
        return None
    _, scales, _, norms = zip(*(part.operands for part in found), strict=True)
    if not (len(norms[0]) and len(norms[2]) and all(part.dtype is torch.float32 for part in scales)):
        return None
    attention = find_attention(scales[0].device, torch.float32, head_dim, rows)
    operator = _operator_of(found[0].product, rows, head_dim, attention) if attention else None
    return WholeLayer(found, operator) if operator else None


@cache
def _operator_of(product: Product, rows: KeptRows, head_dim: int, attention: Attention) -> Operator | None:
    """The operator, which runs the functions of the product and of attention, compiled at the first call."""
    tensors = ", ".join(f"Tensor{'(a!)' if name == 'cache' else ''} {name}" for name in TENSORS)
    return find_operator(
        f"layer_{product.kind}_{rows.kind}_{head_dim}({tensors}, float least_qkv, float least_gated, int num_heads, "
        "float scale, int window) -> Tensor",
        "layer", product, rows.kind, head_dim, entry="layer",
        check=partial(_check, product, rows, head_dim, attention), instead="with an operator for each part of a layer",
    )  # fmt: skip


def _check(product: Product, rows: KeptRows, head_dim: int, attention: Attention, operator: Operator) -> None:
    """RuntimeError if two tokens behind three others get other bits than by an operator for each part."""
    width, num_slots = math.lcm(product.group or 1, _CHECKED_WIDTH), 5
    num_heads = width // math.gcd(width, head_dim)
    attended = num_heads * head_dim
    shapes = (3 * attended, width), (width, attended), (2 * width, width), (width, width)
    weights = (torch.arange(math.prod(shape)).view(shape).remainder(13).sub(6) for shape in shapes)
    parts = [NativeLinear(product, *sample(product, weight_OI, 2.0**-6), None) for weight_OI in weights]
    qkv, output, gated, down = parts
    qkv.take_in(torch.ones(width), 1.0, gates=False)
    gated.take_in(torch.ones(width), 1.0, gates=True)
    x_ME = torch.arange(2.0 * width).sin_().view(2, width)
    cache_2NSW = rows.pack(torch.arange(2.0 * num_slots * attended).cos_().view(2 * num_heads, num_slots, head_dim))
    positions_BT = torch.tensor([[3, 4]])
    turns_S1P = torch.polar(torch.ones(num_slots, 1, head_dim // 2), torch.arange(num_slots).float()[:, None, None])
    place = TokenPlaces(turns_S1P, positions_BT, positions_BT.flatten(), cache_2NSW, positions_BT, ALL)
    wanted_2NSW = cache_2NSW.clone()
    attended_ME = attention(qkv.fused(x_ME), *place._replace(cache_2NSW=wanted_2NSW), num_heads, 1.0, 0)
    middle_ME = output(attended_ME, x_ME)
    wanted_ME = down(gated.fused(middle_ME), middle_ME)
    found_ME = WholeLayer(parts, operator)(x_ME, place, num_heads=num_heads, scale=1.0, window=0)
    if not (torch.equal(found_ME, wanted_ME) and torch.equal(cache_2NSW, wanted_2NSW)):
        raise RuntimeError("a compiled layer is wrong on this CPU")
