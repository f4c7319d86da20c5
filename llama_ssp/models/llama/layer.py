"""One layer of the lean decoder, and the RMS norm; see `decoder`.

One matrix product gives queries, keys and values, another gate and up. One complex product rotates queries and keys.
The queries of a group are folded into rows, so that keys and values are never expanded. On one rank the linear layer
adds the residual.

Shapes: B sequences, T positions, M = B * T tokens, E embedding width, H query heads, N key-value heads, G = H / N, D
head dim, U MLP units, all of this rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llama_ssp.distributed.comms import Comm
from llama_ssp.models.attention import attend_by_position
from llama_ssp.models.cache import CacheView
from llama_ssp.models.linear import Kernel, Linear, PlainLinear, make_linear
from llama_ssp.models.llama.fused import apply_rotary, gated
from llama_ssp.models.tensor_parallel import RowLinear


class Layer:
    """Attention and MLP of one layer, taken from a module of transformers, which is emptied.

    With `by_position` the positions of a round are computed one by one (see `attention`).
    """

    def __init__(self, layer: Any, number: int, *, comm: Comm, kernel: Kernel | None, by_position: bool) -> None:  # noqa: ANN401
        self._by_position = by_position
        attention, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.weight.shape[0] // self._head_dim
        self._num_kv_heads = attention.k_proj.weight.shape[0] // self._head_dim
        self.group = self._num_heads // self._num_kv_heads
        self._scale: float = attention.scaling
        self._attention_norm = RmsNorm(layer.input_layernorm)
        self._mlp_norm = RmsNorm(layer.post_attention_layernorm)
        head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        for module in (attention.q_proj, attention.k_proj, *head_norms):
            _interleave(module, self._head_dim)
        self._head_norms = [RmsNorm(norm) for norm in head_norms]
        self._qkv = make_linear(*take(attention.q_proj, attention.k_proj, attention.v_proj), kernel=kernel)
        self._output = _Residual(attention.o_proj, comm=comm, kernel=kernel)
        self._gate_up = make_linear(*take(mlp.gate_proj, mlp.up_proj), kernel=kernel)
        self._down = _Residual(mlp.down_proj, comm=comm, kernel=kernel)

    def forward(
        self, x_ME: Tensor, freqs_cis_M1P: Tensor, mask_B1QS: Tensor, view: CacheView, *, batch_size: int
    ) -> Tensor:
        """Add attention, then the MLP, to x.

        Args:
            x_ME: the residual stream.
            freqs_cis_M1P: each token's rotary factors, complex.
            mask_B1QS: added to the scores of the Q = T * G queries of each key-value head.
            view: of the cache.
            batch_size: B.
        """
        attended_ME = self._attend(self._attention_norm(x_ME), freqs_cis_M1P, mask_B1QS, view, batch_size=batch_size)
        x_ME = self._output(attended_ME, x_ME)
        return self._down(gated(self._gate_up(self._mlp_norm(x_ME))), x_ME)

    def _attend(
        self, x_ME: Tensor, freqs_cis_M1P: Tensor, mask_B1QS: Tensor, view: CacheView, *, batch_size: int
    ) -> Tensor:
        num_heads, num_turned = self._num_heads, self._num_heads + self._num_kv_heads
        qkv_MXD = self._qkv(x_ME).view(-1, num_turned + self._num_kv_heads, self._head_dim)
        turned_MXD = qkv_MXD.narrow(1, 0, num_turned)
        if self._head_norms:
            for norm, heads in zip(self._head_norms, turned_MXD.split([num_heads, self._num_kv_heads], 1), strict=True):
                heads.copy_(norm(heads))
        qkv_MXD = _turned(qkv_MXD, freqs_cis_M1P, num_turned)
        keys_BNSD, values_BNSD = view.update(qkv_MXD.narrow(1, num_heads, 2 * self._num_kv_heads), self._number)
        queries_MHD = qkv_MXD.narrow(1, 0, num_heads)
        grouped_BTNGD = queries_MHD.view(batch_size, -1, self._num_kv_heads, self.group, self._head_dim)
        queries_BNQD = grouped_BTNGD.transpose(1, 2).flatten(2, 3)

        def attend(queries: Tensor, mask: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                queries, keys_BNSD, values_BNSD, attn_mask=mask, scale=self._scale
            )

        if self._by_position:
            attended_BNQD = attend_by_position(attend, queries_BNQD, mask_B1QS, group=self.group)
        else:
            attended_BNQD = attend(queries_BNQD, mask_B1QS)
        attended_BNTGD = attended_BNQD.unflatten(2, (-1, self.group))
        attended_ME: Tensor = attended_BNTGD.transpose(1, 2).reshape(-1, num_heads * self._head_dim)
        return attended_ME


class RmsNorm:
    """The root-mean-square norm over the last dimension.

    torch has one operator for it on a GPU only. In fp32 on the CPU, where each small operator costs as much as the
    arithmetic, the vector's length is used: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - each family has its own class
        weight_E: Tensor = module.weight.detach()
        width = weight_E.shape[0]
        self._eps: float = module.variance_epsilon
        self._by_length = weight_E.device.type == "cpu" and weight_E.dtype == torch.float32
        self._weight_E = weight_E * width**0.5 if self._by_length else weight_E
        self._least_length = weight_E.new_tensor((width * self._eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x (..., E)."""
        if not self._by_length:
            return functional.rms_norm(x, self._weight_E.shape, self._weight_E, self._eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least_length)
        return (x / lengths).mul_(self._weight_E)


class _Residual:
    """A row-parallel linear layer whose output, summed over the ranks, is added to the residual."""

    def __init__(self, module: nn.Module, *, comm: Comm, kernel: Kernel | None) -> None:
        weight, bias = take(module)
        self._comm = comm
        self._is_shared = isinstance(module, RowLinear)
        self._linear: Linear = make_linear(weight, None if self._is_shared else bias, kernel=kernel)
        self._bias_E = bias
        self._width = weight.shape[0]

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        if not self._is_shared:
            return self._linear.add(x_MI, residual_ME)
        if (part_ME := self._in_window(x_MI)) is not None:
            # Not the other way round: the next product overwrites the window.
            sum_ME = residual_ME.add_(self._comm.all_reduce(part_ME))
        else:
            sum_ME = self._comm.all_reduce(self._linear(x_MI)).add_(residual_ME)
        return sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)

    def _in_window(self, x_MI: Tensor) -> Tensor | None:
        """This rank's part of the sum, in the window of the group if it has one and the part fits."""
        if self._comm.window is None or not isinstance(self._linear, PlainLinear):
            return None
        place_ME = self._comm.window.place(x_MI.shape[0], self._width, x_MI.dtype)
        return None if place_ME is None else self._linear.into(x_MI, place_ME)


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
