"""Whole layers in one operator: `code.layer`, for a few tokens on one rank, where all their parts are compiled.

Layers that follow each other, with equal shapes, norms and windows, are one call. The reference is an operator for each
part; the bits are the same.

Shapes: M tokens, E width, S slots of all rows, N key-value heads, D head dim, P = D / 2, B rows, T positions of a row,
I inputs, O outputs, W width of a cache's row.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llama_ssp.extensions.cpu.attention import ALL, Attention, TokenPlaces, find_attention
from llama_ssp.extensions.cpu.code.kinds import PRODUCTS, TENSORS
from llama_ssp.extensions.cpu.linear import CompiledLinear, sample
from llama_ssp.extensions.cpu.operators import Operator, find_operator
from llama_ssp.kernels.linear import NativeLinear
from llama_ssp.kernels.parts import Heads, KeptRows
from llama_ssp.storage.formats import Product

if TYPE_CHECKING:
    from llama_ssp.extensions.cpu.decoder import LayerOperator

_CHECKED_WIDTH = 128


class CompiledLayers:
    """Layers in one operator, for at most `engine.WHOLE_LAYER_TOKENS` tokens.

    Args:
        first: the number of the first layer.
        layers: for each layer, its products: qkv, output, gate and up, down; the first and the third include a norm.
        operator: the operator for their kind and the heads' size.

    Attributes:
        first: see above.
        stop: the number after the last layer's.
    """

    def __init__(self, first: int, layers: Sequence[Sequence[CompiledLinear]], operator: Operator) -> None:
        self.first, self.stop = first, first + len(layers)
        self._operator = operator
        self._weights = [[tensor for part in parts for tensor in part.operands] for parts in layers]
        self._least_squares = _least_squares(layers[0])

    def compute(
        self,
        x_ME: Tensor,
        place: TokenPlaces,
        caches: Sequence[Tensor],
        *,
        first: int,
        num_heads: int,
        scale: float,
        window: int,
    ) -> Tensor:
        """Return the residual stream after as many layers as there are caches; writes keys and values of the tokens.

        `first` is the number of the first of these layers; `place` has its cache as well.
        """
        layers = self._weights[first - self.first :][: len(caches)]
        return self._operator(
            x_ME,
            place.turns_S1P,
            place.positions_BT,
            place.slots_M,
            place.own_slots_BT,
            place.sees_BTA,
            caches,
            [*chain.from_iterable(layers)],
            *self._least_squares,
            num_heads,
            scale,
            window,
        )

    def __call__(self, x_ME: Tensor, attend: "LayerOperator", numbers: range, heads: Heads) -> Tensor:
        """The residual stream after layers of these numbers, by the attention of one forward."""

        def like() -> Tensor:
            return x_ME.new_empty(x_ME.shape[0], 2 * heads.num_kv, heads.dim)

        place = attend.place(numbers.start, like)
        caches = [attend.view.buffer(number, like).parts for number in numbers]
        return self.compute(
            x_ME, place, caches, first=numbers.start, num_heads=heads.num, scale=heads.scale, window=attend.window or 0
        )


def _least_squares(parts: Sequence[CompiledLinear]) -> tuple[float, float]:
    return parts[0].least_square, parts[2].least_square


def whole_layers(
    layers: Sequence[Sequence[NativeLinear | None]], head_dim: int, rows: KeptRows, windows: Sequence[int | None]
) -> Iterator[CompiledLayers]:
    """The layers of these parts that can be computed so on this machine, as many at once as possible."""
    for (_, form), group in groupby(range(len(layers)), key=lambda number: (windows[number], _form(layers[number]))):
        numbers = [*group]
        if form is None:
            continue
        attention = find_attention(head_dim, rows)
        if operator := _operator_of(form[0], rows, head_dim, attention) if attention else None:
            found = [[part for part in layers[number] if isinstance(part, CompiledLinear)] for number in numbers]
            yield CompiledLayers(numbers[0], found, operator)


def _form(parts: Sequence[NativeLinear | None]) -> tuple[Product, Hashable, Hashable] | None:
    """Common form of layers that one call may compute; None for a layer of other parts."""
    found = [part for part in parts if isinstance(part, CompiledLinear)]
    if len(found) < len(PRODUCTS) or len({part.product for part in found}) > 1:
        return None
    _, scales, _, norms = zip(*(part.operands for part in found), strict=True)
    if not (len(norms[0]) and len(norms[2]) and all(part.dtype is torch.float32 for part in scales)):
        return None
    shapes = tuple(tensor.shape for part in found for tensor in part.operands)
    return found[0].product, _least_squares(found), shapes


@cache
def _operator_of(product: Product, rows: KeptRows, head_dim: int, attention: Attention) -> Operator | None:
    """The operator, which runs the functions of the product and of attention, compiled at the first call."""
    tensors = ", ".join(f"Tensor {name}" for name in TENSORS)
    return find_operator(
        f"layers_{product.kind}_{rows.kind}_{head_dim}({tensors}, Tensor(a!)[] caches, Tensor[] operands, "
        "float least_qkv, float least_gated, int num_heads, float scale, int window) -> Tensor",
        "layer",
        product,
        rows.kind,
        head_dim,
        entry="layers",
        check=partial(_check, product, rows, head_dim, attention),
        instead="with an operator for each part of a layer",
    )


def _check(product: Product, rows: KeptRows, head_dim: int, attention: Attention, operator: Operator) -> None:
    """RuntimeError if two tokens after three others get other bits from two layers than from all their parts."""
    width, num_slots = math.lcm(product.group or 1, _CHECKED_WIDTH), 5
    num_heads = width // math.gcd(width, head_dim)
    attended = num_heads * head_dim
    shapes = (3 * attended, width), (width, attended), (2 * width, width), (width, width)
    weights = (torch.arange(math.prod(shape)).view(shape).remainder(13).sub(6) for shape in shapes)
    parts = [CompiledLinear(product, *sample(product, weight_OI, 2.0**-6), None) for weight_OI in weights]
    qkv, output, gated, down = parts
    qkv.take_in(torch.ones(width), 1.0, gates=False)
    gated.take_in(torch.ones(width), 1.0, gates=True)
    x_ME = torch.arange(2.0 * width).sin_().view(2, width)
    cache_2NSW = rows.pack(torch.arange(2.0 * num_slots * attended).cos_().view(2 * num_heads, num_slots, head_dim))
    positions_BT = torch.tensor([[3, 4]])
    turns_S1P = torch.polar(torch.ones(num_slots, 1, head_dim // 2), torch.arange(num_slots).float()[:, None, None])
    place = TokenPlaces(turns_S1P, positions_BT, positions_BT.flatten(), cache_2NSW, positions_BT, ALL)
    wanted, found = ([cache_2NSW.clone() for _ in range(2)] for _ in range(2))
    wanted_ME = x_ME
    for own_2NSW in wanted:
        attended_ME = attention(qkv.fused(wanted_ME), *place._replace(cache_2NSW=own_2NSW), num_heads, 1.0, 0)
        middle_ME = output(attended_ME, wanted_ME.clone())
        wanted_ME = down(gated.fused(middle_ME), middle_ME)
    layers = CompiledLayers(0, [parts, parts], operator)
    found_ME = layers.compute(x_ME, place, found, first=0, num_heads=num_heads, scale=1.0, window=0)
    if not (torch.equal(found_ME, wanted_ME) and all(map(torch.equal, found, wanted))):
        raise RuntimeError("compiled layers are wrong on this CPU")
