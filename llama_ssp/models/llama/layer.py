"""One layer of the lean decoder; see `decoder`.

    norm | query-key-value | rotary, cache, attention | output + residual | norm | gate-up | silu | down + residual

One matrix product gives queries, keys and values, another gate and up. With tensor parallelism an all-reduce follows
output and down, and the next norm adds the sum of the ranks to the residual. What else becomes one operator:

    CPU    norm, product and gate; for a few tokens on one rank whole layers; see `NativeLinear`, `WholeLayers`
    GPU    all that stands between two products; see `kernels.between`

Shapes: M tokens, X heads, I inputs, O outputs, E embedding width, D head dim, all of this rank.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.engine import WHOLE_LAYER_TOKENS
from llama_ssp.architectures.matrices import FUSED
from llama_ssp.kernels.between import OwnKernels, gated
from llama_ssp.kernels.linear import Kernel, Linear, NativeLinear, make_linear, native_of
from llama_ssp.kernels.parts import Heads, RmsNorm
from llama_ssp.models.llama.attention import LayerAttention, WholeLayers
from llama_ssp.models.weights import Weights
from llama_ssp.ranks.comms import Comm


class Unsummed(NamedTuple):
    """This rank's part (M, E) of an update, which the next norm sums over the ranks of `comm`."""

    part_ME: Tensor
    comm: Comm


class Unread(NamedTuple):
    """The embedding (V, E) and the token ids of the stream, whose rows the first norm will look up."""

    embedding_VE: Tensor
    ids_M: Tensor


Stream = tuple[Tensor, Tensor | Unsummed | Unread | None]
"""The residual stream (M, E), and the pending update to it."""


def added(stream: Stream) -> Tensor:
    """Return the stream with all pending parts added; call it once."""
    x_ME, pending = stream
    if isinstance(pending, Unread):
        return functional.embedding(pending.ids_M, pending.embedding_VE)
    if isinstance(pending, Unsummed):
        pending = pending.comm.all_reduce(pending.part_ME)
    return x_ME if pending is None else x_ME + pending


def rows_at(x_MO: Tensor, positions_BR: Tensor | None) -> Tensor:
    """Return the rows (B * R, O) of some positions of all sequences, given all (B * T, O); None keeps all rows."""
    if positions_BR is None:
        return x_MO
    x_BTO = x_MO.view(len(positions_BR), -1, x_MO.shape[1])
    return x_BTO.gather(1, positions_BR[..., None].expand(-1, -1, x_MO.shape[1])).flatten(0, 1)


class NormedProduct:
    """A linear layer after an RMS norm, followed by the gate if the layer is gate and up of an MLP.

    Args:
        norm: the norm before it; also an attribute.
        linear: the layer, which nothing else may call; also an attribute.
        own: the kernels of a GPU, which are filled in later.
        gates: whether the result is silu(gate) * up.
    """

    def __init__(self, norm: RmsNorm, linear: Linear, own: OwnKernels, *, gates: bool = False) -> None:
        self.norm, self.linear, self._own, self._gates = norm, linear, own, gates
        native = native_of(linear)
        takes_in = native and norm.by_length and native.take_in(norm.weight_E, norm.least_square, gates=gates)
        self._native = native if takes_in else None

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the stream (M, E) with all parts added, which may overwrite the given one, and the product (M, O)."""
        x_ME, pending = stream
        if self._native:
            x_ME = added(stream)
            return x_ME, self._native.fused(x_ME)
        if isinstance(pending, Unsummed) and pending.comm.peers:  # on all ranks, whatever else works on them
            normed_ME = pending.comm.peers.add_norm(pending.part_ME, x_ME, self.norm.weight_E, self.norm.eps)
        elif self._own.add_norm and not isinstance(pending, Unsummed):
            found, ids_M = pending if isinstance(pending, Unread) else (pending, None)
            normed_ME = self._own.add_norm(x_ME, found, self.norm.weight_E, self.norm.eps, ids_M=ids_M)
        else:
            x_ME = added(stream)
            normed_ME = self.norm(x_ME)
        y_MO = self.linear(normed_ME)
        return x_ME, (self._own.gated or gated)(y_MO) if self._gates else y_MO


class ResidualProduct:
    """A row-parallel linear layer whose output is added to the residual, at once or by the next norm.

    Attributes:
        is_shared: whether each rank holds only some of the inputs; the sum over the ranks then waits for the next norm.
        linear: this rank's part of the layer; without the bias if it is shared.
    """

    def __init__(self, weights: Weights, name: str, *, comm: Comm, kernel: Kernel | None) -> None:
        self._comm = comm
        self.is_shared = weights.is_cut(f"{name}.weight")
        weight_OI, self._bias_E = weights.linear(name)
        self.linear: Linear = make_linear(weight_OI, None if self.is_shared else self._bias_E, kernel=kernel)

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Stream:
        """Add the output for x to the residual, which may be overwritten."""
        if self.is_shared:
            part_ME, peers = self.linear(x_MI), self._comm.peers
            if peers and self._bias_E is None and peers.takes_rows(part_ME):
                return residual_ME, Unsummed(part_ME, self._comm)
            sum_ME = self._comm.all_reduce(part_ME)
            return residual_ME, sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)
        return self.linear(x_MI, residual_ME), None


class Layer:
    """Attention and MLP of one layer.

    Args:
        weights: the weights from which the layer's are taken, one product after the other.
        number: the number of the layer.
        heads: the heads of this rank.
        eps: the constant of the norms.
        comm: the ranks that share the layer.
        kernel: the kernel of its linear layers; None takes the fastest for each shape.
        own: the kernels of a GPU, which are filled in later.

    Attributes:
        number, heads: see above.
        head_norms: norms of queries and keys, in models that have them.
        qkv, output, gate_up, down: the products, in the order of their use.
        whole: one operator for this layer and others around it; None if there is none.
    """

    def __init__(
        self,
        weights: Weights,
        number: int,
        *,
        heads: Heads,
        eps: float,
        comm: Comm,
        kernel: Kernel | None,
        own: OwnKernels,
    ) -> None:
        self.number, self.heads = number, heads
        place = f"model.layers.{number}"

        def linear(part: str, *names: str) -> Linear:
            fused = f"{place}.{part}.{FUSED[names[0]]}_proj"
            modules = [fused] if f"{fused}.weight" in weights else [f"{place}.{part}.{name}" for name in names]
            weight_OI, bias_O = weights.linear(*modules)
            if part == "self_attn":
                for outputs in (weight_OI, bias_O):
                    if outputs is not None:
                        _interleave(outputs[: (heads.num + heads.num_kv) * heads.dim], heads.dim)
            return make_linear(weight_OI, bias_O, kernel=kernel)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(weights.take(f"{place}.{name}.weight"), eps)

        qkv = linear("self_attn", "q_proj", "k_proj", "v_proj")
        self.head_norms = []
        for name in ("q_norm", "k_norm"):
            if (stored := f"{place}.self_attn.{name}.weight") in weights:
                _interleave(weight_D := weights.take(stored).detach(), heads.dim)
                self.head_norms.append(RmsNorm(weight_D, eps))
        self.output = ResidualProduct(weights, f"{place}.self_attn.o_proj", comm=comm, kernel=kernel)
        gate_up = linear("mlp", "gate_proj", "up_proj")
        self.qkv = self._first_product(norm, qkv, own)
        self.gate_up = self._second_product(norm, gate_up, own)
        self.down = ResidualProduct(weights, f"{place}.mlp.down_proj", comm=comm, kernel=kernel)
        self.whole: WholeLayers | None = None

    @property
    def parts(self) -> list[NativeLinear | None]:
        """Its compiled products, if it consists of nothing else; see `OperatorAttention.whole_layers`."""
        is_whole = isinstance(self.qkv, NormedProduct) and not (
            self.head_norms or self.output.is_shared or self.down.is_shared
        )
        return [native_of(linear) for linear in self.linears] if is_whole else []

    def stop_of(self, num_tokens: int) -> int:
        """Return one more than the number of the last layer that is computed in one call with this one."""
        return self.whole.stop if self.whole and num_tokens <= WHOLE_LAYER_TOKENS else self.number + 1

    def _first_product(self, norm: Callable[[str], RmsNorm], linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401
        """Queries, keys and values after the first norm; `norm` takes one by name."""
        return NormedProduct(norm("input_layernorm"), linear, own)

    def _second_product(self, norm: Callable[[str], RmsNorm], linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401
        """The units of the MLP, gated, after the second norm."""
        return NormedProduct(norm("post_attention_layernorm"), linear, own, gates=True)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of its products, in the order in which they run."""
        return self.qkv.linear, self.output.linear, self.gate_up.linear, self.down.linear

    def forward(self, stream: Stream, attend: LayerAttention, stop: int, wanted_BR: Tensor | None = None) -> Stream:
        """Add attention and then the MLP to the stream; `attend` is the attention for the window of this layer.

        With `wanted_BR`, only these positions are computed after attention, and returned. One call computes all layers
        up to `stop`, at most `stop_of`.
        """
        x_ME, _ = stream
        if self.whole and x_ME.shape[0] <= WHOLE_LAYER_TOKENS:
            return rows_at(self.whole(x_ME, attend, range(self.number, stop), self.heads), wanted_BR), None
        x_ME, qkv_MO = self.qkv(stream)
        attended_ME = rows_at(attend(qkv_MO, self.number, self.heads, self.head_norms), wanted_BR)
        x_ME, gated_MI = self.gate_up(self.output(attended_ME, rows_at(x_ME, wanted_BR)))
        return self.down(gated_MI, x_ME)


def join(layers: Sequence[Layer], wholes: Iterable[WholeLayers]) -> None:
    """Make as few operators as possible that compute these layers of a model for a few tokens."""
    for whole in wholes:
        for layer in layers[whole.first : whole.stop]:
            layer.whole = whole


def _interleave(outputs: Tensor, head_dim: int) -> None:
    """Reorder each head's outputs in place, so that the rotary pairs of transformers, i and i + D / 2, are adjacent."""
    order_D = torch.arange(head_dim).view(2, -1).t().flatten()
    heads = outputs.unflatten(0, (-1, head_dim))
    heads.copy_(heads[:, order_D])
