"""The layers of the lean decoder on a GPU: torch's products, and few kernels between them.

    norm | query-key-value | rotary, cache | attention | output + residual | norm | gate-up | silu | down + residual

Attention has a second kernel where a row is split. With tensor parallelism an all-reduce follows output and down, and
the next norm adds its result to the residual. Quantized weights have products of their own. Where one of our kernels
does not work, torch's operators stand in for it alone; `fused_products` has products that take in more.

Shapes: B sequences, T positions, M = B * T tokens, R tokens that get logits, I inputs, O outputs, E embedding width, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.distributed.comms import Comm
from llama_ssp.models.linear import Linear
from llama_ssp.models.llama.attention import Attend
from llama_ssp.models.llama.layer import Layer, ResidualLinear, gated
from llama_ssp.models.llama.norm import RmsNorm
from llama_ssp.models.llama.rotary import PlaceHeads, RotateWrite

AddNorm = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""`kernels.add_norm`."""


class OwnKernels(NamedTuple):
    """Our kernels that work on this device; None where torch's operators run instead."""

    rotate_write: RotateWrite | None = None
    add_norm: AddNorm | None = None
    gated: Callable[[Tensor], Tensor] | None = None


class Stream(NamedTuple):
    """The residual stream (M, E), and what nobody has added to it yet."""

    x_ME: Tensor
    pending_ME: Tensor | None = None

    def added(self) -> Tensor:
        """The stream with everything added."""
        return self.x_ME if self.pending_ME is None else self.x_ME + self.pending_ME


class NormedProduct:
    """A linear layer behind an RMS norm.

    Args:
        norm: before it.
        linear: the layer.
        kernels: those of ours that work.
        gates: the layer is gate and up of an MLP, and the result silu(gate) * up.
        dtype: of the result; None for that of the weights.
    """

    def __init__(
        self,
        norm: RmsNorm,
        linear: Linear,
        kernels: OwnKernels,
        *,
        gates: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.norm, self.linear = norm, linear
        self.gates, self.dtype = gates, dtype
        self._add_norm, self._gated = kernels.add_norm, kernels.gated or gated

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the whole stream (M, E), which may overwrite the given one, and the product (M, O)."""
        x_ME, pending_ME = stream
        if pending_ME is not None and self._add_norm:
            normed_ME = self._add_norm(x_ME, pending_ME, self.norm.weight_E, self.norm.eps)
        else:
            x_ME = stream.added()
            normed_ME = self.norm(x_ME)
        y_MO = self.linear(normed_ME)
        y_MO = self._gated(y_MO) if self.gates else y_MO
        return x_ME, y_MO if self.dtype is None else y_MO.to(self.dtype)

    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""
        return self(Stream(x_MI))[1]


class AddedProduct:
    """A row-parallel linear layer whose output is added to the residual, at once or by the next norm."""

    def __init__(self, residual: ResidualLinear) -> None:
        self.linear = residual.linear
        self._residual = residual

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Stream:
        """Add the product of x to the residual, which may be overwritten."""
        if self._residual.is_shared:
            return Stream(residual_ME, self._residual.summed(x_MI))
        return Stream(self._added(x_MI, residual_ME))

    def _added(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        return self.linear.add(x_MI, residual_ME)

    def try_out(self, x_MI: Tensor) -> Tensor:
        """The product of inputs that are not used otherwise."""
        width = self._residual.width
        return self._added(x_MI, x_MI.new_zeros(len(x_MI), width))


class GpuLayer:
    """A layer, over the weights of the layer for every device."""

    def __init__(self, layer: Layer, kernels: OwnKernels) -> None:
        self._number, self._heads, self._head_norms = layer.number, layer.heads, layer.head_norms
        self.qkv = NormedProduct(layer.attention_norm, layer.qkv, kernels)
        self.output = AddedProduct(layer.output)
        self.gate_up = NormedProduct(layer.mlp_norm, layer.gate_up, kernels, gates=True)
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

    Attributes:
        kernels: those of ours that work.
        layers, head: the parts.
    """

    def __init__(
        self, layers: Sequence[Layer], norm: RmsNorm, head: Linear, *, comm: Comm, kernels: OwnKernels
    ) -> None:
        self.kernels = kernels
        self.layers = [GpuLayer(layer, kernels) for layer in layers]
        # Gathered logits are sent in 16 bits.
        self.head = NormedProduct(norm, head, kernels, dtype=torch.float32 if comm.size == 1 else None)

    def forward(
        self, x_ME: Tensor, place: PlaceHeads, attends: Sequence[Attend], *, score_positions_BR: Tensor | None
    ) -> Tensor:
        """Map the embedded tokens, which may be overwritten, to this rank's logits (B * R, V).

        `attends` are those of the layers; `score_positions_BR` is which of the T tokens to score, None for all.
        """
        stream = Stream(x_ME)
        for layer, attend in zip(self.layers, attends, strict=True):
            stream = layer.forward(stream, place, attend)
        if score_positions_BR is not None:
            x_BTE = stream.added().view(score_positions_BR.shape[0], -1, x_ME.shape[-1])
            places_BRE = score_positions_BR[..., None].expand(-1, -1, x_ME.shape[-1])
            stream = Stream(x_BTE.gather(1, places_BRE).flatten(0, 1))
        return self.head(stream)[1]
