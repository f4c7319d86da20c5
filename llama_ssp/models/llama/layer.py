"""One layer of the lean decoder, and the RMS norm; see `decoder`.

One matrix product gives queries, keys and values, another gate and up. One complex product rotates queries and keys.
On one rank the linear layer adds the residual. Module `attention` attends.

Shapes: M tokens, X heads, E embedding width, D head dim, P = D / 2 pairs of dimensions, U MLP units, all of this rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.distributed.comms import Comm
from llama_ssp.models.cache import CacheView
from llama_ssp.models.linear import Kernel, Linear, make_linear
from llama_ssp.models.llama.attention import Attend, Heads
from llama_ssp.models.llama.fused import apply_rotary, gated
from llama_ssp.models.tensor_parallel import RowLinear


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

    def forward(self, x_ME: Tensor, freqs_cis_M1P: Tensor, attend: Attend, view: CacheView) -> Tensor:
        """Add attention, then the MLP, to x.

        Args:
            x_ME: the residual stream.
            freqs_cis_M1P: each token's rotary factors, complex.
            attend: for the window of this layer.
            view: of the cache.
        """
        attended_ME = self._attend(self.attention_norm(x_ME), freqs_cis_M1P, attend, view)
        x_ME = self.output(attended_ME, x_ME)
        return self.down(gated(self.gate_up(self.mlp_norm(x_ME))), x_ME)

    def _attend(self, x_ME: Tensor, freqs_cis_M1P: Tensor, attend: Attend, view: CacheView) -> Tensor:
        num_heads, num_kv_heads, head_dim, _ = self.heads
        num_turned = num_heads + num_kv_heads
        qkv_MXD = self.qkv(x_ME).view(-1, num_turned + num_kv_heads, head_dim)
        turned_MXD = qkv_MXD.narrow(1, 0, num_turned)
        if self.head_norms:
            for norm, heads in zip(self.head_norms, turned_MXD.split([num_heads, num_kv_heads], 1), strict=True):
                heads.copy_(norm(heads))
        qkv_MXD = _turned(qkv_MXD, freqs_cis_M1P, num_turned)
        keys, values = view.update(qkv_MXD.narrow(1, num_heads, 2 * num_kv_heads), self.number)
        return attend(qkv_MXD.narrow(1, 0, num_heads), keys, values, self.heads)


class RmsNorm:
    """The root-mean-square norm over the last dimension.

    torch has one operator for it on a GPU only. In fp32 on the CPU, where each small operator costs as much as the
    arithmetic, the vector's length is used: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - each family has its own class
        weight_E: Tensor = module.weight.detach()
        width = weight_E.shape[0]
        self.eps: float = module.variance_epsilon
        self._by_length = weight_E.device.type == "cpu" and weight_E.dtype == torch.float32
        self.weight_E = weight_E * width**0.5 if self._by_length else weight_E
        self._least_length = weight_E.new_tensor((width * self.eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x (..., E)."""
        if not self._by_length:
            return functional.rms_norm(x, self.weight_E.shape, self.weight_E, self.eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least_length)
        return (x / lengths).mul_(self.weight_E)


class ResidualLinear:
    """A row-parallel linear layer whose output, summed over the ranks, is added to the residual.

    Attributes:
        is_shared: each rank holds some of the inputs.
        linear: of this rank; without the bias if it is shared.
    """

    def __init__(self, module: nn.Module, *, comm: Comm, kernel: Kernel | None) -> None:
        weight, bias = take(module)
        self._comm = comm
        self.is_shared = isinstance(module, RowLinear)
        self.linear: Linear = make_linear(weight, None if self.is_shared else bias, kernel=kernel)
        self._bias_E = bias

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        """Add the output for x to the residual, which may be overwritten."""
        if not self.is_shared:
            return self.linear.add(x_MI, residual_ME)
        sum_ME = self._comm.all_reduce(self.linear(x_MI)).add_(residual_ME)
        return sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)

    def summed(self, part_ME: Tensor) -> Tensor:
        """Sum the outputs of all ranks, and add the bias."""
        sum_ME = self._comm.all_reduce(part_ME)
        return sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)


def _turned(heads_MXD: Tensor, freqs_cis_M1P: Tensor, num_turned: int) -> Tensor:
    """Rotate adjacent pairs of dimensions of the first heads, in fp32; on the CPU by one operator, in place."""
    if heads_MXD.device.type == "cuda":
        return apply_rotary(heads_MXD, torch.view_as_real(freqs_cis_M1P), num_turned)
    first_MXD = heads_MXD.narrow(1, 0, num_turned)
    in_fp32 = first_MXD.float()
    torch.view_as_complex(in_fp32.unflatten(-1, (-1, 2))).mul_(freqs_cis_M1P)
    if in_fp32 is not first_MXD:
        first_MXD.copy_(in_fp32)
    return heads_MXD


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
