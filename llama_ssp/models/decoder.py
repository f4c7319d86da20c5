"""A lean decoder for the Llama kind, as an `interface.Runner`: the library's function in less than half its operators.

It takes over the weights of the library's modules, cut by `tensor_parallel`, layer by layer as they are loaded, and
leaves the modules empty. Queries, keys and values come from one matrix, gate and up from another; one complex product
turns queries and keys; the queries of a group are folded into rows, so that keys and values are never expanded; on one
rank the residual is added inside the linear layer. What depends on positions alone is looked up in tables.

Shapes: B sequences, T positions, M = B * T tokens, R rows that get logits, V vocabulary, E embedding width,
H query heads, N key-value heads, G = H / N, D head dim, U MLP units, all of this rank.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.distributed.comms import Comm
from llama_ssp.models.attention import attend_by_position
from llama_ssp.models.families import windows_of
from llama_ssp.models.kv_cache import Aim, LayerBuffer, Masks, StaticCache, mask_rows
from llama_ssp.models.linear import Kernel, Linear, make_linear
from llama_ssp.models.quantization import UNQUANTIZED, Precision
from llama_ssp.models.recorded import Recorded
from llama_ssp.models.tensor_parallel import GatheredLinear

# Families that are the same function up to biases, norms of queries and keys, and rotary frequencies.
_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}

Sizes = tuple[int, int, bool]
"""B, T, and whether only some rows are wanted: what decides the operators of a forward."""


def is_llama_kind(config: PretrainedConfig) -> bool:
    """Whether the lean decoder computes this model."""
    if config.model_type not in _MODEL_TYPES or config.hidden_act != "silu":
        return False
    rope: dict[str, Any] = config.rope_parameters or {}
    return bool(rope.get("partial_rotary_factor", 1.0) == 1.0)


class LeanRunner:
    """A model of the Llama kind, or this rank's slice of it, with its static cache.

    Args:
        model: the library's, cut by `tensor_parallel.shard`; it is of no use afterwards.
        comm: the ranks that share it.
        fill: gives values to the parameters whose names begin with a prefix; None when they have them.
        kernel: the form of all linear layers; None takes the fastest for each shape.
        precision: how those in the layers are stored; the head keeps its number format.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        comm: Comm,
        fill: Callable[[str], None] | None = None,
        kernel: Kernel | None = None,
        precision: Precision = UNQUANTIZED,
    ) -> None:
        config: Any = model.config
        body: Any = model.model
        head: Any = model.lm_head
        assert is_llama_kind(config)
        fill = fill or (lambda _prefix: None)
        layers = []
        for number, layer in enumerate(body.layers):
            fill(f"model.layers.{number}.")
            layers.append(
                _Layer(layer, number, comm=comm, kernel=precision.kernel or kernel, by_position=precision.rounds_inputs)
            )
        fill("")
        self.vocab_size: int = config.vocab_size
        self._width: int = config.hidden_size
        self.max_position_embeddings: int = config.max_position_embeddings
        self.device: torch.device = head.weight.device
        self.dtype: torch.dtype = head.weight.dtype
        self._comm = comm
        self._rotary = body.rotary_emb
        self._embed: nn.Module = body.embed_tokens
        self._layers = layers
        self._windows = windows_of(config)
        self._norm = _RmsNorm(body.norm)
        self._head_sizes = head.sizes if isinstance(head, GatheredLinear) else (self.vocab_size,)
        is_tied = head.weight is body.embed_tokens.weight
        self._head = make_linear(*_take(head), kernel=kernel, keeps_weight=is_tied)
        self.num_allocations = 0
        self._cache: StaticCache | None = None
        self._recorded: Recorded[Sizes] | None = None
        if self.device.type == "cpu" and not precision.rounds_inputs:
            self._recorded = Recorded(self._forward_over, layers, self._norm, self._head, self._embed)

    def allocate(self, *, batch_size: int, capacity: int) -> None:
        """Make room in the cache; see `Runner.allocate`."""
        if self._cache is not None and self._cache.fits(batch_size=batch_size, capacity=capacity):
            return
        self.num_allocations += 1
        num_layers = len(self._layers)
        self._cache = StaticCache(num_layers=num_layers, batch_size=batch_size, capacity=capacity, device=self.device)
        self._masks = Masks(self._windows, capacity=capacity, dtype=self.dtype, device=self.device)
        angles_SP = torch.arange(capacity, device=self.device)[:, None] * self._rotary.inv_freq.float()
        self._turns_S1P = torch.polar(torch.full_like(angles_SP, self._rotary.attention_scaling), angles_SP)[:, None]

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        *,
        bucket: int,
        rows_BR: Tensor | None = None,
        batch_rows_B: Tensor | None = None,
    ) -> Tensor:
        """Read tokens into the cache and score what follows them; see `Runner.forward`."""
        assert self._cache is not None, "allocate comes first"
        cache, masks = self._cache, self._masks
        sizes = ids_BT.shape[0], ids_BT.shape[1], rows_BR is not None
        pieces = masks.shown(bucket)
        if self._recorded and batch_rows_B is None and (layers := cache.shown(bucket)):
            inputs = (ids_BT, positions_BT) if rows_BR is None else (ids_BT, positions_BT, rows_BR)
            made = self._turns_S1P, cache.first_slot_B1, masks.last, *pieces.values(), *chain.from_iterable(layers)
            return self._recorded(sizes, *inputs, *made)
        aim = cache.aim(positions_BT, bucket=bucket, batch_rows_B=batch_rows_B)
        tables = _Tables(self._turns_S1P, masks.last, pieces, aim)
        return self._forward(sizes, ids_BT, positions_BT, rows_BR, tables)

    def _forward(
        self, sizes: Sizes, ids_BT: Tensor, positions_BT: Tensor, rows_BR: Tensor | None, tables: "_Tables"
    ) -> Tensor:
        """What is done with ids and positions, in terms of what `allocate` has made."""
        batch_size, num_tokens, _ = sizes
        turns_M1P = tables.turns_S1P.index_select(0, positions_BT.flatten())
        positions_BQ = positions_BT[..., None].repeat(1, 1, self._layers[0].group).flatten(1)
        masks = {
            window: mask_rows(pieces_SU, tables.last, positions_BQ, batch_size=batch_size)
            for window, pieces_SU in tables.pieces.items()
        }
        x_ME = self._embed(ids_BT.flatten())
        for layer, window in zip(self._layers, self._windows, strict=True):
            x_ME = layer.forward(x_ME, turns_M1P, masks[window], tables.aim, batch_size=batch_size)
        if rows_BR is not None:
            x_BTE = x_ME.view(batch_size, num_tokens, -1)
            x_ME = x_BTE.gather(1, rows_BR[..., None].expand(-1, -1, self._width)).flatten(0, 1)
        logits_MV: Tensor = self._comm.all_gather_last(self._head(self._norm(x_ME)), self._head_sizes)
        return logits_MV.view(batch_size, -1, self.vocab_size).float()

    def _forward_over(self, sizes: Sizes, ids_BT: Tensor, positions_BT: Tensor, *made: Tensor) -> Tensor:
        """`_forward` as it is recorded: all that `allocate` makes anew is an argument."""
        rows_BR, made = (made[0], made[1:]) if sizes[-1] else (None, made)
        turns_S1P, first_slot_B1, last, *more = made
        pieces = dict(zip(dict.fromkeys(self._windows), more, strict=False))
        layers = [LayerBuffer(*more[start : start + 3]) for start in range(len(pieces), len(more), 3)]
        aim = Aim(lambda number, _: layers[number], first_slot_B1, positions_BT, batch_rows_B=None)
        return self._forward(sizes, ids_BT, positions_BT, rows_BR, _Tables(turns_S1P, last, pieces, aim))


class _Tables(NamedTuple):
    """What a forward looks up, and where it writes.

    Attributes:
        turns_S1P: the rotary factors of all positions.
        last: the last of them; see `mask_rows`.
        pieces: of the masks (S, U), by window.
        aim: into the cache.
    """

    turns_S1P: Tensor
    last: Tensor
    pieces: dict[int | None, Tensor]
    aim: Aim


class _Layer:
    """Attention and MLP of one layer.

    Args:
        layer: the library's module, which is emptied.
        number: which layer it is.
        comm: the ranks that share it.
        kernel: see `make_linear`.
        by_position: attend to a round's positions one after the other (see `attention`).
    """

    def __init__(
        self,
        layer: Any,  # noqa: ANN401
        number: int,
        *,
        comm: Comm,
        kernel: Kernel | None,
        by_position: bool,
    ) -> None:
        self._by_position = by_position
        attention, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._head_dim: int = attention.head_dim
        self._num_heads = attention.q_proj.weight.shape[0] // self._head_dim
        self._num_kv_heads = attention.k_proj.weight.shape[0] // self._head_dim
        self.group = self._num_heads // self._num_kv_heads
        self._scale: float = attention.scaling
        self._attention_norm = _RmsNorm(layer.input_layernorm)
        self._mlp_norm = _RmsNorm(layer.post_attention_layernorm)
        has_head_norms = hasattr(attention, "q_norm")
        for module in (attention.q_proj, attention.k_proj):
            _interleave(module, self._head_dim)
        for module in (attention.q_norm, attention.k_norm) if has_head_norms else ():
            _interleave(module, self._head_dim)
        self._head_norms = (_RmsNorm(attention.q_norm), _RmsNorm(attention.k_norm)) if has_head_norms else None
        self._qkv = make_linear(*_take(attention.q_proj, attention.k_proj, attention.v_proj), kernel=kernel)
        self._output = _Residual(attention.o_proj, comm=comm, kernel=kernel)
        self._gate_up = make_linear(*_take(mlp.gate_proj, mlp.up_proj), kernel=kernel)
        self._down = _Residual(mlp.down_proj, comm=comm, kernel=kernel)

    def forward(self, x_ME: Tensor, turns_M1P: Tensor, mask_B1QS: Tensor, aim: Aim, *, batch_size: int) -> Tensor:
        """Add attention, then the MLP, to x.

        Args:
            x_ME: the residual stream.
            turns_M1P: each token's rotary factors, complex.
            mask_B1QS: what to add to the scores of the T * G queries of each key-value head.
            aim: where keys and values go, and come from.
            batch_size: B.
        """
        attended_ME = self._attend(self._attention_norm(x_ME), turns_M1P, mask_B1QS, aim, batch_size=batch_size)
        x_ME = self._output(attended_ME, x_ME)
        gate_MU, up_MU = self._gate_up(self._mlp_norm(x_ME)).chunk(2, dim=-1)
        return self._down(functional.silu(gate_MU).mul_(up_MU), x_ME)

    def _attend(self, x_ME: Tensor, turns_M1P: Tensor, mask_B1QS: Tensor, aim: Aim, *, batch_size: int) -> Tensor:
        num_heads, num_turned = self._num_heads, self._num_heads + self._num_kv_heads
        qkv_MXD = self._qkv(x_ME).view(-1, num_turned + self._num_kv_heads, self._head_dim)
        turned_MXD = qkv_MXD.narrow(1, 0, num_turned)
        if self._head_norms:
            for norm, heads in zip(self._head_norms, turned_MXD.split([num_heads, self._num_kv_heads], 1), strict=True):
                heads.copy_(norm(heads))
        _turn_(turned_MXD, turns_M1P)
        keys_BNSD, values_BNSD = aim.update(qkv_MXD.narrow(1, num_heads, 2 * self._num_kv_heads), self._number)
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


class _RmsNorm:
    """The root-mean-square norm over the last dimension.

    torch has it as one operator on a GPU only; for fp32 on the CPU, where each of its many small ones costs as much as
    the arithmetic, the vector's length serves: x / sqrt(mean(x^2) + eps) = sqrt(E) x / hypot(|x|, sqrt(E eps)).
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - each family has a class of its own
        weight_E: Tensor = module.weight.detach()
        width = weight_E.shape[0]
        self._eps: float = module.variance_epsilon
        self._by_length = weight_E.device.type == "cpu" and weight_E.dtype == torch.float32
        self._weight_E = weight_E * width**0.5 if self._by_length else weight_E
        self._least_length = weight_E.new_tensor((width * self._eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._by_length:
            return functional.rms_norm(x, self._weight_E.shape, self._weight_E, self._eps)
        lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least_length)
        return (x / lengths).mul_(self._weight_E)


class _Residual:
    """A row-parallel linear layer whose output, summed over the ranks, goes on top of the residual."""

    def __init__(self, module: nn.Module, *, comm: Comm, kernel: Kernel | None) -> None:
        weight, bias = _take(module)
        self._comm = comm
        self._is_shared = comm.size > 1
        self._linear: Linear = make_linear(weight, None if self._is_shared else bias, kernel=kernel)
        self._bias_E = bias

    def __call__(self, x_MI: Tensor, residual_ME: Tensor) -> Tensor:
        if not self._is_shared:
            return self._linear.add(x_MI, residual_ME)
        sum_ME = self._comm.all_reduce(self._linear(x_MI)).add_(residual_ME)
        return sum_ME if self._bias_E is None else sum_ME.add_(self._bias_E)


def _turn_(heads_MXD: Tensor, turns_M1P: Tensor) -> None:
    """Turn adjacent pairs of dimensions, in fp32 and in place."""
    in_fp32 = heads_MXD.float()
    torch.view_as_complex(in_fp32.unflatten(-1, (-1, 2))).mul_(turns_M1P)
    if in_fp32 is not heads_MXD:
        heads_MXD.copy_(in_fp32)


def _interleave(module: nn.Module, head_dim: int) -> None:
    """Reorder each head's outputs, so that the pairs that the library turns, i and i + D / 2, become neighbours."""
    order_D = torch.arange(head_dim).view(2, -1).t().flatten()
    for name, parameter in list(module.named_parameters()):
        heads_XD = parameter.detach().unflatten(0, (-1, head_dim))
        setattr(module, name, nn.Parameter(heads_XD[:, order_D].flatten(0, 1), requires_grad=False))


def _take(*modules: Any) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401 - linear layers, whole or local
    """Weight and bias of linear layers side by side; the modules are emptied."""
    weights = [module.weight.detach() for module in modules]
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    for module in modules:
        module.weight = module.bias = None
    return _joined(weights), _joined(biases) if biases else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
