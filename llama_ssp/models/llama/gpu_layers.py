"""The layers of the lean decoder on a GPU: few kernels, each as large as it can be.

For up to 32 tokens of plain weights, which most rounds are, a layer is seven kernels, two of them attention's:

    norm, query-key-value | rotary, cache | attention, its sum | output, residual | norm, gate-up, silu | down, residual

With tensor parallelism an all-reduce follows output and down, and the next product adds its result to the residual.
Quantized weights and longer forwards have kernels of their own for their products; then the residual and the norm are
one kernel, and so is silu. Module `trials` chooses for every plain product between our kernel and torch's operators.

Shapes: B sequences, T positions, M = B * T tokens, R tokens that get logits, I inputs, O outputs, E embedding width, V
vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.distributed.comms import Comm
from llama_ssp.models.linear import Linear
from llama_ssp.models.llama import kernels
from llama_ssp.models.llama.attention import Attend
from llama_ssp.models.llama.fused import gated
from llama_ssp.models.llama.layer import Layer, ResidualLinear
from llama_ssp.models.llama.norm import RmsNorm
from llama_ssp.models.llama.rotary import PlaceHeads
from llama_ssp.models.llama.trials import Product, choose, try_add_norm, try_rotate_write

_SMALLEST_EXPONENT = -14
"""Of normal numbers in fp16."""


class Stream(NamedTuple):
    """The residual stream (M, E), and what nobody has added to it yet."""

    x_ME: Tensor
    pending_ME: Tensor | None = None

    def added(self) -> Tensor:
        """The stream with everything added."""
        return self.x_ME if self.pending_ME is None else self.x_ME + self.pending_ME


class NormedProduct(Product):
    """A linear layer behind an RMS norm.

    Args:
        gates: the layer is gate and up of an MLP, and the result silu(gate) * up.
        dtype: of the result; None for that of the weights.
    """

    def __init__(self, norm: RmsNorm, linear: Linear, *, gates: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__(linear)
        self._norm = norm
        self._gates, self._dtype = gates, dtype
        # No product of a finite x with the scaled weight overflows.
        largest = max(float(norm.weight_E.abs().max()), 2.0**_SMALLEST_EXPONENT)
        scale = 2.0 ** -math.ceil(math.log2(largest))
        self._norm_weight = kernels.NormWeight(norm.weight_E * scale, scale, norm.eps)

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the whole stream (M, E), which may overwrite the given one, and the product (M, O)."""
        x_ME = stream.x_ME
        if self.plain and (tile := self.tile(x_ME)):
            return kernels.product(
                x_ME, self.plain.weight_OI, tile=tile, norm=self._norm_weight, bias_O=self.plain.bias_O,
                added_MI=stream.pending_ME, gates=self._gates, dtype=self._dtype,
            )  # fmt: skip
        if stream.pending_ME is None:
            normed_ME = self._norm(x_ME)
        else:
            normed_ME = kernels.add_norm(x_ME, stream.pending_ME, self._norm.weight_E, self._norm.eps)
        y_MO = self.linear(normed_ME)
        y_MO = gated(y_MO) if self._gates else y_MO
        return x_ME, y_MO if self._dtype is None else y_MO.to(self._dtype)

    def try_out(self, x_MI: Tensor) -> Tensor:
        """See `Product`."""
        return self(Stream(x_MI))[1]


class AddedProduct(Product):
    """A row-parallel linear layer whose output is added to the residual, at once or by the next product."""

    def __init__(self, residual: ResidualLinear) -> None:
        super().__init__(residual.linear)
        self._residual = residual

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Stream:
        """Add the product of x to the residual, which may be overwritten."""
        if self._residual.is_shared:
            part_ME = self._product(x_MI, self._residual.window_place(x_MI))
            return Stream(residual_ME, self._residual.summed(part_ME))
        if self.plain is None:
            return Stream(residual_ME, self.linear(x_MI))
        if tile := self.tile(x_MI):
            weight_OI, bias_O = self.plain.weight_OI, self.plain.bias_O
            return Stream(kernels.product(x_MI, weight_OI, tile=tile, bias_O=bias_O, residual_MO=residual_ME)[1])
        return Stream(self.plain.add(x_MI, residual_ME))

    def try_out(self, x_MI: Tensor) -> Tensor:
        """See `Product`."""
        return self._product(x_MI)

    def _product(self, x_MI: Tensor, into_ME: Tensor | None = None) -> Tensor:
        if self.plain and (tile := self.tile(x_MI)):
            weight_OI, bias_O = self.plain.weight_OI, self.plain.bias_O
            return kernels.product(x_MI, weight_OI, tile=tile, bias_O=bias_O, into_MO=into_ME)[1]
        return self.linear(x_MI) if self.plain is None or into_ME is None else self.plain.into(x_MI, into_ME)


class GpuLayer:
    """A layer, over the weights of the layer for every device."""

    def __init__(self, layer: Layer) -> None:
        self._number, self._heads, self._head_norms = layer.number, layer.heads, layer.head_norms
        self.qkv = NormedProduct(layer.attention_norm, layer.qkv)
        self.output = AddedProduct(layer.output)
        self.gate_up = NormedProduct(layer.mlp_norm, layer.gate_up, gates=True)
        self.down = AddedProduct(layer.down)

    def forward(self, stream: Stream, place: PlaceHeads, attend: Attend) -> Stream:
        """Add attention, then the MLP, to the stream; see `Layer.forward`."""
        num_heads, num_kv_heads, head_dim, _ = self._heads
        x_ME, qkv_MO = self.qkv(stream)
        qkv_MXD = qkv_MO.view(-1, num_heads + 2 * num_kv_heads, head_dim)
        placed = place(qkv_MXD, self._number, self._heads, self._head_norms)
        x_ME, gated_MI = self.gate_up(self.output(attend(*placed, self._heads), x_ME))
        return self.down(gated_MI, x_ME)


class GpuLayers:
    """The layers, the last norm and the head.

    Raises whatever a kernel raises that does not run on this device, and RuntimeError if one is wrong there.

    Attributes:
        rotate_write: the kernel of `rotary.PlaceByKernel`.
        products: those that `trials` chooses kernels for, in groups of one shape.
    """

    def __init__(self, layers: Sequence[Layer], norm: RmsNorm, head: Linear, *, comm: Comm) -> None:
        self.rotate_write = try_rotate_write(layers[0], like=norm.weight_E)
        try_add_norm(norm)
        self._layers = [GpuLayer(layer) for layer in layers]
        # Gathered logits are sent in 16 bits.
        self._head = NormedProduct(norm, head, dtype=torch.float32 if comm.size == 1 else None)
        self.products: dict[str, list[Product]] = {
            "qkv": [layer.qkv for layer in self._layers],
            "output": [layer.output for layer in self._layers],
            "gate_up": [layer.gate_up for layer in self._layers],
            "down": [layer.down for layer in self._layers],
            "head": [self._head],
        }
        for products in self.products.values():
            choose(products)

    def forward(
        self, x_ME: Tensor, place: PlaceHeads, attends: Sequence[Attend], *, score_positions_BR: Tensor | None
    ) -> Tensor:
        """Map the embedded tokens, which may be overwritten, to this rank's logits (B * R, V).

        `attends` are those of the layers; `score_positions_BR` is which of the T tokens to score, None for all.
        """
        stream = Stream(x_ME)
        for layer, attend in zip(self._layers, attends, strict=True):
            stream = layer.forward(stream, place, attend)
        if score_positions_BR is not None:
            x_BTE = stream.added().view(score_positions_BR.shape[0], -1, x_ME.shape[-1])
            places_BRE = score_positions_BR[..., None].expand(-1, -1, x_ME.shape[-1])
            stream = Stream(x_BTE.gather(1, places_BRE).flatten(0, 1))
        return self._head(stream)[1]
