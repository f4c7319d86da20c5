"""Attention of the lean decoder by the compiled operator, and whole layers with it.

Shapes: B rows, T positions, M = B * T tokens, X = H + 2 N heads, D head dim, E = H * D, O = X * D, P = D / 2, S slots,
A slots that are seen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.extensions.cpu.attention import ALL, Attention, TokenPlaces, find_attention
from llama_ssp.extensions.cpu.layer import CompiledLayers, whole_layers
from llama_ssp.kernels.between import norm_heads
from llama_ssp.kernels.linear import NativeLinear
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm
from llama_ssp.models.cache import CacheView
from llama_ssp.models.llama.attention import LayerAttention
from llama_ssp.models.runner import TreePlaces


@dataclass(frozen=True, slots=True)
class LayerOperator:
    """A `LayerAttention` of one operator, whose bits do not depend on other tokens.

    Attributes:
        attention: the operator.
        freqs_cis_S1P: the rotary factors of all positions.
        positions_BT: positions of the tokens, contiguous.
        own_slots_BT: their slots in their rows, contiguous.
        sees_BTA: what nodes of trees see, contiguous, or `attention.ALL`.
        view: the part of the cache that the forward reads and writes.
        window: how many positions a token sees, including its own.
    """

    attention: Attention
    freqs_cis_S1P: Tensor
    positions_BT: Tensor
    own_slots_BT: Tensor
    sees_BTA: Tensor
    view: CacheView
    window: int | None

    def __call__(self, qkv_MO: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]) -> Tensor:
        """See `LayerAttention`."""

        def split() -> Tensor:
            return qkv_MO.view(-1, heads.num + 2 * heads.num_kv, heads.dim)

        if norms:
            norm_heads(split(), norms, heads)
        place = self.place(number, lambda: split().narrow(1, heads.num, 2 * heads.num_kv))
        sizes = heads.num, heads.scale, self.window or 0
        if qkv_MO.dtype is torch.float32:  # a trace would hold conversions that do nothing
            return self.attention(qkv_MO, *place, *sizes)
        return self.attention(qkv_MO.float(), *place, *sizes).to(qkv_MO.dtype)

    def place(self, number: int, like: Callable[[], Tensor]) -> TokenPlaces:
        """Return positions and slots of the tokens, for a layer; `like` makes a tensor like its keys and values."""
        parts = self.view.buffer(number, like).parts
        return TokenPlaces(
            self.freqs_cis_S1P, self.positions_BT, self.view.slots_M, parts, self.own_slots_BT, self.sees_BTA
        )


class CompiledAttention:
    """Attention of a model by an operator, for heads of one size over a cache of rows; see `OperatorAttention`.

    Models in 16 bits round between the parts of a layer, so every forward, whatever its size, computes these one by
    one.
    """

    def __init__(self, operator: Attention, head_dim: int, rows: KeptRows, *, is_fp32: bool) -> None:
        self.operator, self._head_dim, self._rows, self._is_fp32 = operator, head_dim, rows, is_fp32
        self._sees_all = ALL  # traces find the tensors that runners hold

    def of_forward(
        self,
        freqs_cis_S1P: Tensor,
        positions_BT: Tensor,
        view: CacheView,
        *,
        tree: TreePlaces | None,
        seen_BT: Tensor | None,
        windows: Sequence[int | None],
    ) -> dict[int | None, LayerAttention]:
        """The attention of one forward, by window."""
        positions_BT = positions_BT.contiguous()
        slots_BT = tree.slots_BT.contiguous() if tree else positions_BT
        where = freqs_cis_S1P, positions_BT, slots_BT if seen_BT is None else seen_BT
        sees_BTA = tree.sees_BTA.contiguous() if tree else self._sees_all
        return {window: LayerOperator(self.operator, *where, sees_BTA, view, window) for window in set(windows)}

    def whole_layers(
        self, layers: Sequence[Sequence[NativeLinear | None]], windows: Sequence[int | None]
    ) -> Iterator[CompiledLayers]:
        """The layers of these products that one operator computes, as many at once as possible."""
        return whole_layers(layers, self._head_dim, self._rows, windows) if self._is_fp32 else iter(())


def find_model_attention(dtype: torch.dtype, head_dim: int, rows: KeptRows) -> CompiledAttention | None:
    """The attention of a model in this dtype; None where this machine cannot have the operator."""
    operator = find_attention(head_dim, rows)
    return CompiledAttention(operator, head_dim, rows, is_fp32=dtype is torch.float32) if operator else None
