"""The lean decoder for a few tokens on a GPU, such as a round's: seven kernels a layer, two of them attention's.

    norm, query-key-value | rotary, cache | attention, its sum | output, residual | norm, gate-up, silu | down, residual

With tensor parallelism an all-reduce follows output and down, and the next product adds its result to the residual.

Every product is tried when the decoder is built, in our kernel and in torch's operators, over the weights of several
layers, so that none is found in a cache. Where ours is slower, or wrong, torch's stay.

Shapes: B sequences, T positions, M = B * T tokens, R tokens that get logits, I inputs, O outputs, E embedding width, V
vocabulary.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.distributed.comms import Comm
from llama_ssp.models.cache import LayerBuffer
from llama_ssp.models.linear import Linear, PlainLinear
from llama_ssp.models.llama import kernels
from llama_ssp.models.llama.attention import Attend
from llama_ssp.models.llama.fused import gated
from llama_ssp.models.llama.layer import Layer, ResidualLinear, RmsNorm

_log = logging.getLogger(__name__)

_TILES = (kernels.Tile(), kernels.Tile(outputs=64, inputs=64, num_stages=6))
_TIMED_ROWS = (1, 5)
_TIMED_LAYERS, _NUM_TURNS = 8, 3
_TOLERANCE = 0.02
"""Of the largest value: sums in another order and one rounding more or less differ by less."""


class Stream(NamedTuple):
    """The residual stream (M, E), and a sum of the ranks that nobody has added to it yet."""

    x_ME: Tensor
    pending_ME: Tensor | None = None

    def added(self) -> Tensor:
        """The stream with everything added."""
        return self.x_ME if self.pending_ME is None else self.x_ME + self.pending_ME


class NormedProduct:
    """A linear layer behind an RMS norm.

    Attributes:
        tile: of our kernel; None for torch's operators.
    """

    def __init__(
        self, norm: RmsNorm, linear: PlainLinear, *, gates: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self._norm, self._linear = norm, linear
        self._gates, self._dtype = gates, dtype
        # No product of a finite x with the scaled weight overflows.
        scale = 2.0 ** -max(math.ceil(math.log2(max(float(norm.weight_E.abs().max()), 1e-30))), -14)
        self._norm_weight = kernels.NormWeight(norm.weight_E * scale, scale, norm.eps)
        self.num_inputs = linear.weight_OI.shape[1]
        self.tile: kernels.Tile | None = _TILES[0]

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the whole stream (M, E), and the product (M, O)."""
        if self.tile:
            return kernels.product(
                stream.x_ME, self._linear.weight_OI, tile=self.tile, norm=self._norm_weight, bias_O=self._linear.bias_O,
                added_MI=stream.pending_ME, gates=self._gates, dtype=self._dtype,
            )  # fmt: skip
        x_ME = stream.added()
        y_MO = self._linear(self._norm(x_ME))
        return x_ME, gated(y_MO) if self._gates else y_MO if self._dtype is None else y_MO.to(self._dtype)

    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""
        return self(Stream(x_MI))[1]


class AddedProduct:
    """A row-parallel linear layer whose output is added to the residual: at once, or after the sum of the ranks.

    Attributes:
        tile: of our kernel; None for torch's operators.
    """

    def __init__(self, residual: ResidualLinear, linear: PlainLinear) -> None:
        self._residual, self._linear = residual, linear
        self.num_inputs = linear.weight_OI.shape[1]
        self.tile: kernels.Tile | None = _TILES[0]

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Stream:
        """Add the product of x to the residual, which is overwritten."""
        if self._residual.is_shared:
            return Stream(residual_ME, self._residual.summed(self._product(x_MI)))
        if self.tile is None:
            return Stream(self._linear.add(x_MI, residual_ME))
        return Stream(self._product(x_MI, residual_ME))

    def _product(self, x_MI: Tensor, residual_ME: Tensor | None = None) -> Tensor:
        if self.tile is None:
            return self._linear(x_MI)
        weight_OI, bias_O = self._linear.weight_OI, self._linear.bias_O
        return kernels.product(x_MI, weight_OI, tile=self.tile, bias_O=bias_O, residual_MO=residual_ME)[1]

    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""
        return self._product(x_MI)


Product = NormedProduct | AddedProduct


class FewRowsLayer:
    """A layer for few tokens, over the weights of the layer for many."""

    def __init__(self, layer: Layer) -> None:
        self._number, self._heads = layer.number, layer.heads
        self._head_norms = None
        if layer.head_norms:
            query, key = layer.head_norms
            self._head_norms = kernels.HeadNorms(query.weight_E, key.weight_E, query.eps)
        self.qkv = NormedProduct(layer.attention_norm, _plain(layer.qkv))
        self.output = AddedProduct(layer.output, _plain(layer.output.linear))
        self.gate_up = NormedProduct(layer.mlp_norm, _plain(layer.gate_up), gates=True)
        self.down = AddedProduct(layer.down, _plain(layer.down.linear))

    def forward(
        self,
        stream: Stream,
        turns_SP2: Tensor,
        positions_BT: Tensor,
        attend: Attend,
        buffer: Callable[[int, Tensor], LayerBuffer],
    ) -> Stream:
        """Add attention, then the MLP, to the stream."""
        num_heads, num_kv_heads, head_dim, _ = self._heads
        x_ME, qkv_MO = self.qkv(stream)
        qkv_MXD = qkv_MO.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        parts, keys, values = buffer(self._number, qkv_MXD.narrow(1, num_heads, 2 * num_kv_heads))
        kernels.rotate_write(qkv_MXD, turns_SP2, positions_BT, parts, num_heads=num_heads, norms=self._head_norms)
        attended_MI = attend(qkv_MXD.narrow(1, 0, num_heads), keys, values, self._heads)
        x_ME, gated_MI = self.gate_up(self.output(attended_MI, x_ME))
        return self.down(gated_MI, x_ME)


class FewRows:
    """The layers, the last norm and the head, for few tokens."""

    def __init__(self, layers: Sequence[Layer], norm: RmsNorm, head: Linear, *, comm: Comm) -> None:
        self._layers = [FewRowsLayer(layer) for layer in layers]
        # Gathered logits are sent in 16 bits.
        self._head = NormedProduct(norm, _plain(head), dtype=torch.float32 if comm.size == 1 else None)
        kinds: list[Sequence[Product]] = [
            [layer.qkv for layer in self._layers], [layer.output for layer in self._layers],
            [layer.gate_up for layer in self._layers], [layer.down for layer in self._layers], [self._head],
        ]  # fmt: skip
        for products in kinds:
            choose_tile(products, like=norm.weight_E)

    def forward(
        self,
        x_ME: Tensor,
        turns_SP2: Tensor,
        positions_BT: Tensor,
        attends: Sequence[Attend],
        buffer: Callable[[int, Tensor], LayerBuffer],
        *,
        score_positions_BR: Tensor | None,
    ) -> Tensor:
        """Map the embedded tokens to this rank's logits (B * R, V).

        Args:
            x_ME: the embedded tokens, overwritten.
            turns_SP2: cosines and sines of all positions.
            positions_BT: of the tokens.
            attends: by layer.
            buffer: maps a layer's number, and its new keys and values, to the layer's part of the cache.
            score_positions_BR: which of the T tokens to score; None for all.
        """
        stream = Stream(x_ME)
        for layer, attend in zip(self._layers, attends, strict=True):
            stream = layer.forward(stream, turns_SP2, positions_BT, attend, buffer)
        if score_positions_BR is not None:
            x_BTE = stream.added().view(*positions_BT.shape, -1)
            places_BRE = score_positions_BR[..., None].expand(-1, -1, x_BTE.shape[-1])
            stream = Stream(x_BTE.gather(1, places_BRE).flatten(0, 1))
        return self._head(stream)[1]


def _plain(linear: Linear) -> PlainLinear:
    assert isinstance(linear, PlainLinear)
    return linear


def can_fuse(layers: Sequence[Layer], head: Linear) -> bool:
    """Whether all products of a decoder are of plain weights in 16 bits."""
    linears = [head, *(one for layer in layers for one in (layer.qkv, layer.output.linear, layer.gate_up, layer.down.linear))]
    return all(type(one) is PlainLinear and one.weight_OI.element_size() == 2 for one in linears)  # noqa: PLR2004 - bytes


@torch.inference_mode()
def choose_tile(products: Sequence[Product], *, like: Tensor) -> None:
    """Give products of one shape the fastest tile of those that are right, or torch's operators."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(num_rows, products[0].num_inputs, generator=generator).to(like.device, like.dtype)
        for num_rows in _TIMED_ROWS
    ]
    timed = products[:_TIMED_LAYERS]
    best_s = math.inf
    best: kernels.Tile | None = None
    for tile in (*_TILES, None):
        for product in timed:
            product.tile = tile
        if tile and not all(_is_right(products[0], x_MI) for x_MI in inputs):
            _log.warning("continuing without a fused product of %d inputs, which is wrong here", products[0].num_inputs)
            continue
        took_s = sum(_seconds(timed, x_MI) for x_MI in inputs)
        if took_s < best_s:
            best_s, best = took_s, tile
    for product in products:
        product.tile = best


def _is_right(product: Product, x_MI: Tensor) -> bool:
    """Whether our kernel's result is that of torch's operators."""
    found_MO, tile = product.try_out(x_MI), product.tile
    product.tile = None
    wanted_MO = product.try_out(x_MI)
    product.tile = tile
    most = _TOLERANCE * wanted_MO.abs().max()
    return not bool((~((found_MO - wanted_MO).abs() <= most)).any())  # so is NaN


def _seconds(products: Sequence[Product], x_MI: Tensor) -> float:
    """The least time of all products in a row."""
    took_ms = []
    for _ in range(_NUM_TURNS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for product in products:
            product.try_out(x_MI)
        ended.record()
        ended.synchronize()
        took_ms.append(started.elapsed_time(ended))
    return min(took_ms) * 1e-3
