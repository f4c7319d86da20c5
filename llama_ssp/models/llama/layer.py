"""One layer of the lean decoder; see `decoder`.

One matrix product gives queries, keys and values, another gate and up. What stands between that and the next product,
from the norms of heads to the attended values, is the business of module `attention`. On one rank the linear layer adds
the residual.

Shapes: M tokens, X heads, I inputs, E embedding width, D head dim, all of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.architectures.sizes import WHOLE_LAYER_TOKENS
from llama_ssp.kernels.layer import WholeLayer, whole_layer
from llama_ssp.kernels.linear import Kernel, Linear, make_linear, native_of
from llama_ssp.models.llama.attention import CompiledAttention, LayerAttention
from llama_ssp.models.llama.rotary import RmsNorm
from llama_ssp.models.tensor_parallel import RowLinear
from llama_ssp.models.varlen import Heads
from llama_ssp.ranks.comms import Comm


class Layer:
    """Attention and MLP of one layer, taken from a module of transformers, which is emptied.

    Attributes:
        number: of the layer.
        heads: of the layer.
        head_norms: of queries and keys, in models that have them.
        attention_norm, qkv, output, mlp_norm, gate_up, down: the parts, in the order of their use.
    """

    def __init__(self, layer: Any, number: int, *, comm: Comm, kernel: Kernel | None) -> None:  # noqa: ANN401
        attention, mlp = layer.self_attn, layer.mlp
        self.number = number
        head_dim: int = attention.head_dim
        num_heads, num_kv_heads = (
            module.weight.shape[0] // head_dim for module in (attention.q_proj, attention.k_proj)
        )
        self.heads = Heads(num_heads, num_kv_heads, head_dim, attention.scaling)
        self.attention_norm = RmsNorm(layer.input_layernorm)
        self.mlp_norm = RmsNorm(layer.post_attention_layernorm)
        head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        for module in (attention.q_proj, attention.k_proj, *head_norms):
            _interleave(module, head_dim)
        self.head_norms = [RmsNorm(norm) for norm in head_norms]
        self.qkv = make_linear(*take(attention.q_proj, attention.k_proj, attention.v_proj), kernel=kernel)
        self.output = ResidualLinear(attention.o_proj, comm=comm, kernel=kernel)
        self.gate_up = make_linear(*take(mlp.gate_proj, mlp.up_proj), kernel=kernel)
        self.down = ResidualLinear(mlp.down_proj, comm=comm, kernel=kernel)
        self._to_qkv = normed(self.attention_norm, self.qkv)
        self._to_gated = normed(self.mlp_norm, self.gate_up, gates=True)
        self._whole = self._in_one_operator()

    def _in_one_operator(self) -> WholeLayer | None:
        """The layer in one operator, for a few tokens on one rank; None where its parts are not compiled."""
        if self.head_norms or self.output.is_shared or self.down.is_shared:
            return None
        return whole_layer([native_of(linear) for linear in self.linears], self.heads.dim)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its products, in the order in which they run."""
        return self.qkv, self.output.linear, self.gate_up, self.down.linear

    def forward(self, x_ME: Tensor, attend: LayerAttention) -> Tensor:
        """Add attention, then the MLP, to x.

        Args:
            x_ME: the residual stream.
            attend: for the window of this layer.
        """
        if self._whole and x_ME.shape[0] <= WHOLE_LAYER_TOKENS and isinstance(attend, CompiledAttention):
            return attend.with_products(self._whole, x_ME, self.number, self.heads)
        attended_ME = attend(self._to_qkv(x_ME), self.number, self.heads, self.head_norms)
        x_ME = self.output(attended_ME, x_ME)
        return self.down(self._to_gated(x_ME), x_ME)


def normed(norm: RmsNorm, linear: Linear, *, gates: bool = False) -> Callable[[Tensor], Tensor]:
    """The product of normed rows, and the gate if the layer is gate and up of an MLP; in one operator where it can be.

    After that the layer may be called by nothing else.
    """
    native = native_of(linear)
    if native and norm.by_length and native.take_in(norm.weight_E, norm.least_square, gates=gates):
        return native.fused
    return (lambda x_ME: gated(linear(norm(x_ME)))) if gates else (lambda x_ME: linear(norm(x_ME)))


class ResidualLinear:
    """A row-parallel linear layer whose output, summed over the ranks, is added to the residual.

    Attributes:
        is_shared: each rank holds some of the inputs.
        linear: of this rank; without the bias if it is shared.
        width: of its outputs.
    """

    def __init__(self, module: nn.Module, *, comm: Comm, kernel: Kernel | None) -> None:
        weight, bias = take(module)
        self._comm = comm
        self.is_shared = isinstance(module, RowLinear)
        self.linear: Linear = make_linear(weight, None if self.is_shared else bias, kernel=kernel)
        self._bias_E = bias
        self.width = weight.shape[0]

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        """Add the output for x to the residual, which may be overwritten."""
        if not self.is_shared:
            return self.linear.add(x_MI, residual_ME)
        sum_ME = self._comm.all_reduce(self.linear(x_MI)).add_(residual_ME)
        return sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)

    def summed(self, x_MI: Tensor) -> Tensor:
        """Sum the outputs of all ranks, and add the bias."""
        sum_ME = self._comm.all_reduce(self.linear(x_MI))
        return sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)


def gated(gate_up_M2U: Tensor) -> Tensor:
    """silu(gate) * up of the concatenated gate and up (M, 2 U); returns (M, U)."""
    gate_MU, up_MU = gate_up_M2U.chunk(2, dim=-1)
    return functional.silu(gate_MU).mul_(up_MU)


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
    return parts[0] if len(parts) == 1 else torch.cat(parts)
