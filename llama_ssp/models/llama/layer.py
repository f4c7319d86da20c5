"""One layer of the lean decoder; see `decoder`.

    norm | query-key-value | rotary, cache, attention | output + residual | norm | gate-up | silu | down + residual

One matrix product gives queries, keys and values, another gate and up. With tensor parallelism an all-reduce follows
output and down, and the next norm adds the sum of the ranks to the residual. What else becomes one operator:

    CPU    norm, product and gate; for a few tokens on one rank the whole layer
    GPU    all that stands between two products; see `kernels.between`

Shapes: M tokens, X heads, I inputs, O outputs, E embedding width, D head dim, all of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llama_ssp.architectures.engine import WHOLE_LAYER_TOKENS
from llama_ssp.kernels.between import Heads, OwnKernels, RmsNorm, gated
from llama_ssp.kernels.layer import WholeLayer, whole_layer
from llama_ssp.kernels.linear import Kernel, Linear, make_linear, native_of
from llama_ssp.kernels.rows import KeptRows
from llama_ssp.models.llama.attention import CompiledAttention, LayerAttention
from llama_ssp.models.tensor_parallel import RowLinear
from llama_ssp.ranks.comms import Comm

Stream = tuple[Tensor, Tensor | None]
"""The residual stream (M, E), and the pending update to it."""


def added(stream: Stream) -> Tensor:
    """The stream with everything added."""
    x_ME, pending_ME = stream
    return x_ME if pending_ME is None else x_ME + pending_ME


class NormedProduct:
    """A linear layer behind an RMS norm, and the gate if it is gate and up of an MLP.

    Args:
        norm: before it.
        linear: the layer, which nothing else may call.
        own: the kernels of a GPU, found later.
        gates: the result is silu(gate) * up.
    """

    def __init__(self, norm: RmsNorm, linear: Linear, own: OwnKernels, *, gates: bool = False) -> None:
        self._norm, self.linear, self._own, self._gates = norm, linear, own, gates
        native = native_of(linear)
        takes_in = native and norm.by_length and native.take_in(norm.weight_E, norm.least_square, gates=gates)
        self._native = native if takes_in else None

    def __call__(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the whole stream (M, E), which may overwrite the given one, and the product (M, O)."""
        x_ME, pending_ME = stream
        if self._native:
            x_ME = added(stream)
            return x_ME, self._native.fused(x_ME)
        if self._own.add_norm:
            normed_ME = self._own.add_norm(x_ME, pending_ME, self._norm.weight_E, self._norm.eps)
        else:
            x_ME = added(stream)
            normed_ME = self._norm(x_ME)
        y_MO = self.linear(normed_ME)
        return x_ME, (self._own.gated or gated)(y_MO) if self._gates else y_MO


class ResidualProduct:
    """A row-parallel linear layer whose output is added to the residual, at once or by the next norm.

    Attributes:
        is_shared: each rank holds some of the inputs, and the sum over the ranks waits for the next norm.
        linear: of this rank; without the bias if it is shared.
    """

    def __init__(self, module: nn.Module, *, comm: Comm, kernel: Kernel | None) -> None:
        weight, bias = take(module)
        self._comm = comm
        self.is_shared = isinstance(module, RowLinear)
        self.linear: Linear = make_linear(weight, None if self.is_shared else bias, kernel=kernel)
        self._bias_E = bias

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Stream:
        """Add the output for x to the residual, which may be overwritten."""
        if self.is_shared:
            sum_ME = self._comm.all_reduce(self.linear(x_MI))
            return residual_ME, sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)
        return self.linear.add(x_MI, residual_ME), None


class Layer:
    """Attention and MLP of one layer, taken from a module of transformers, which is emptied.

    `fill` loads the parameters whose names begin with a prefix, those of one product after the other.

    Attributes:
        number: of the layer.
        heads: of the layer.
        head_norms: of queries and keys, in models that have them.
        qkv, output, gate_up, down: the products, in the order of their use.
    """

    def __init__(
        self, layer: Any, number: int, *, comm: Comm, kernel: Kernel | None, own: OwnKernels,  # noqa: ANN401
        fill: Callable[[str], None],
    ) -> None:  # fmt: skip
        attention, mlp = layer.self_attn, layer.mlp
        self.number = number
        head_dim: int = attention.head_dim
        place = f"model.layers.{number}."
        for part in ("q", "k", "v"):
            fill(f"{place}self_attn.{part}")
        queries, keys, values = _query_key_value(attention, head_dim)
        num_heads, num_kv_heads = (module.weight.shape[0] // head_dim for module in (queries, keys))
        self.heads = Heads(num_heads, num_kv_heads, head_dim, attention.scaling)
        head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        for module in (queries, keys, *head_norms):
            _interleave(module, head_dim)
        self.head_norms = [RmsNorm(norm) for norm in head_norms]
        qkv = make_linear(*take(queries, keys, values), kernel=kernel)
        fill(f"{place}self_attn.")
        self.output = ResidualProduct(attention.o_proj, comm=comm, kernel=kernel)
        fill(f"{place}mlp.gate")
        fill(f"{place}mlp.up")
        fused = getattr(mlp, "gate_up_proj", None)
        gate_up = make_linear(*take(*([fused] if fused else [mlp.gate_proj, mlp.up_proj])), kernel=kernel)
        fill(place)
        self.qkv = self._first_product(layer, qkv, own)
        self.gate_up = NormedProduct(RmsNorm(layer.post_attention_layernorm), gate_up, own, gates=True)
        self.down = ResidualProduct(mlp.down_proj, comm=comm, kernel=kernel)
        self._whole: WholeLayer | None = None

    def join(self, kept: KeptRows) -> None:
        """Compute a few tokens in one operator, if there is one, where a cache keeps keys and values so."""
        if isinstance(self.qkv, NormedProduct) and not (
            self.head_norms or self.output.is_shared or self.down.is_shared
        ):
            self._whole = whole_layer([native_of(linear) for linear in self.linears], self.heads.dim, kept)

    def _first_product(self, layer: Any, linear: Linear, own: OwnKernels) -> Any:  # noqa: ANN401
        """Queries, keys and values behind the first norm."""
        return NormedProduct(RmsNorm(layer.input_layernorm), linear, own)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of its products, in the order in which they run."""
        return self.qkv.linear, self.output.linear, self.gate_up.linear, self.down.linear

    def forward(self, stream: Stream, attend: LayerAttention) -> Stream:
        """Add attention, by `attend` for the window of this layer, then the MLP, to the stream."""
        x_ME, _ = stream
        if self._whole and x_ME.shape[0] <= WHOLE_LAYER_TOKENS and isinstance(attend, CompiledAttention):
            return attend.with_products(self._whole, x_ME, self.number, self.heads), None
        x_ME, qkv_MO = self.qkv(stream)
        attended_ME = attend(qkv_MO, self.number, self.heads, self.head_norms)
        x_ME, gated_MI = self.gate_up(self.output(attended_ME, x_ME))
        return self.down(gated_MI, x_ME)


def _query_key_value(attention: Any, head_dim: int) -> tuple[Any, ...]:  # noqa: ANN401 - of transformers
    """The linear layers of an attention's queries, keys and values; a fused one is split."""
    if not hasattr(attention, "qkv_proj"):
        return attention.q_proj, attention.k_proj, attention.v_proj
    weight_OI, bias_O = take(attention.qkv_proj)
    num_keys = attention.num_key_value_heads * head_dim
    sizes = [len(weight_OI) - 2 * num_keys, num_keys, num_keys]
    parts: list[Any] = [nn.Linear(1, 1, bias=bias_O is not None, device="meta") for _ in sizes]
    for name, whole in (("weight", weight_OI), ("bias", bias_O)):
        for part, own in zip(parts, whole.split(sizes), strict=True) if whole is not None else ():
            setattr(part, name, nn.Parameter(own, requires_grad=False))
    return (*parts,)


def _interleave(module: nn.Module, head_dim: int) -> None:
    """Reorder each head's outputs, so that the rotary pairs of transformers, i and i + D / 2, become adjacent."""
    order_D = torch.arange(head_dim).view(2, -1).t().flatten()
    for name, parameter in list(module.named_parameters()):
        heads_XD = parameter.detach().unflatten(0, (-1, head_dim))
        setattr(module, name, nn.Parameter(heads_XD[:, order_D].flatten(0, 1), requires_grad=False))


def take(*modules: Any) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401 - linear layers, whole or local
    """Take the concatenated weights and biases out of linear layers, leaving them empty."""
    weights = [module.weight.detach() for module in modules]
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    for module in modules:
        module.weight = module.bias = None
    return _joined(weights), _joined(biases) if biases else None


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenate parts, and free each once it is copied."""
    if len(parts) == 1:
        return parts.pop()
    sizes = [len(part) for part in parts]
    whole = parts[0].new_empty(sum(sizes), *parts[0].shape[1:])
    for place in whole.split(sizes):
        place.copy_(parts.pop(0))
    return whole
