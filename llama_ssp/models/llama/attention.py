"""The three ways in which the lean decoder attends to its cache: by an operator, by masks, by lengths of rows.

                    by an operator         by masks                     by lengths
    kernel          `OperatorAttention`,   torch's, for masked          ours, and torch's flash attention for
                    with rotary and cache  queries                      prompts; see `kernels.attention_by_length`
    reads           each row up to each    a bucket of slots, some of   each row up to its last position,
                    token's own position   them masked
    grouped heads   in the kernel          queries folded into rows     in the kernel
    CUDA graphs     none                   one for each bucket          one for all lengths
    chosen for      CPUs in fp32, where    other CPUs; fp32 on GPUs;    fp16 and bf16 on GPUs that have
                    `operators` has one    older GPUs; trees on GPUs    the kernel

Rounded inputs need the bits of single steps: the operator gives them anyhow, masks position by position.
`LeanRunner` chooses once, when it is built. Each forward prepares one `LayerAttention` for each window of the layers.

Shapes: B sequences, T positions, M = B * T tokens, Q = T * G queries of a group, S slots, H query heads, N key-value
heads, G = H / N, D head dim, W width of a kept key or value, P = D / 2, X = H + 2 N heads, O = X * D,
C sequences of the kernel, E = H * D.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels.attention_by_length import VarlenAttention
from llama_ssp.kernels.linear import NativeLinear
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm, Sequences
from llama_ssp.models.attention import attend_by_position
from llama_ssp.models.cache import BufferOf, CacheView
from llama_ssp.models.graph_inputs import Workspace
from llama_ssp.models.runner import Pieces, TreePlaces

Attend = Callable[[Tensor, Tensor, Tensor, Heads], Tensor]
"""Maps queries (M, H, D), keys and values as `LayerBuffer` has them, and the heads to (M, H * D)."""

LayerAttention = Callable[[Tensor, int, Heads, Sequence[RmsNorm]], Tensor]
"""Attention of one forward, with all that comes between the products around it.

Maps queries, keys and values (M, O) of a layer, its number, its heads, and the norms of query and key heads in models
that have them, to (M, H * D).
"""


class WholeLayers(Protocol):
    """A run of layers that one operator of a device computes, for at most `engine.WHOLE_LAYER_TOKENS` tokens.

    Attributes:
        first: the number of the first layer.
        stop: one more than the number of the last layer.
    """

    first: int
    stop: int

    def __call__(self, x_ME: Tensor, attend: Any, numbers: range, heads: Heads) -> Tensor:  # noqa: ANN401 - its own
        """Return the residual stream after the layers `numbers`; `attend` is the attention of the same operator."""


class OperatorAttention(Protocol):
    """Attention by an operator of a device, whose bits do not depend on other tokens."""

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
        """The attention of one forward, by window; for arguments see `LeanRunner`."""

    def whole_layers(
        self, layers: Sequence[Sequence[NativeLinear | None]], windows: Sequence[int | None]
    ) -> Iterable[WholeLayers]:
        """The layers of these products that one operator computes with their attention, as many as possible."""


class Rotations(Workspace):
    """The complex rotary factors of all positions, from inverse frequencies (P,) and a factor of them all."""

    def __init__(self, inv_freq_P: Tensor, factor: float, *, capacity: int) -> None:
        angles_SP = torch.arange(capacity, device=inv_freq_P.device)[:, None] * inv_freq_P.float()
        self.freqs_cis_S1P = torch.polar(torch.full_like(angles_SP, factor), angles_SP)[:, None]


def place_and_attend(
    qkv_MO: Tensor,
    number: int,
    heads: Heads,
    norms: Sequence[RmsNorm],
    *,
    rotate_write: Callable[..., None],
    buffer: BufferOf,
    cache_rows_B: Tensor | None,
    attend: Attend,
) -> Tensor:
    """Attend in two steps, as a `LayerAttention`: rotate heads and write them to the cache, then attend to the cache.

    `rotate_write` is that of `kernels.between` or of the device, for the tokens of this forward; `buffer` returns a
    layer's part of the cache. For `cache_rows_B` see `CacheView`.
    """
    qkv_MXD = qkv_MO.view(-1, heads.num + 2 * heads.num_kv, heads.dim)
    held = buffer(number, lambda: qkv_MXD.narrow(1, heads.num, 2 * heads.num_kv))
    rotate_write(qkv_MXD, parts=held.parts, heads=heads, norms=norms)
    return attend(qkv_MXD.narrow(1, 0, heads.num), *held.rows(cache_rows_B), heads)


def attend_by_mask(
    queries_MHD: Tensor,
    keys_BNSW: Tensor,
    values_BNSW: Tensor,
    heads: Heads,
    *,
    mask_B1QS: Tensor,
    batch_size: int,
    by_position: bool,
    kept: KeptRows,
) -> Tensor:
    """`Attend` with a mask that has a row for each query of a group; with `by_position`, position by position."""
    group = heads.num // heads.num_kv
    keys_BNSD, values_BNSD = (kept.unpack(rows, queries_MHD.dtype) for rows in (keys_BNSW, values_BNSW))
    grouped_BTNGD = queries_MHD.view(batch_size, -1, heads.num_kv, group, heads.dim)
    queries_BNQD = grouped_BTNGD.transpose(1, 2).flatten(2, 3)

    def attend(queries: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            queries, keys_BNSD, values_BNSD, attn_mask=mask, scale=heads.scale
        )

    if by_position:
        attended_BNQD = attend_by_position(attend, queries_BNQD, mask_B1QS, group=group)
    else:
        attended_BNQD = attend(queries_BNQD, mask_B1QS)
    attended_BNTGD = attended_BNQD.unflatten(2, (-1, group))
    attended_ME: Tensor = attended_BNTGD.transpose(1, 2).reshape(-1, heads.num * heads.dim)
    return attended_ME


class LengthTables(Workspace):
    """Tables in which a forward looks up where its sequences are in the cache: int32 on the device.

    Args:
        num_slots: the slots of a row.
    """

    def __init__(self, *, batch_size: int, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self._used_S = torch.arange(1, num_slots + 1, dtype=torch.int32, device=device)
        self._sums: dict[tuple[int, int], Tensor] = {}
        self._first_slots = self._running_sum(batch_size, num_slots)

    def attends(
        self,
        varlen: VarlenAttention,
        windows: Iterable[int | None],
        positions_BT: Tensor,
        *,
        cache_rows_B: Tensor | None,
        consecutive: bool,
        pieces: Pieces | None,
    ) -> dict[int | None, Attend]:
        """The attention of a forward by window.

        Every piece of a packed forward is a sequence, and every token is one if positions are not consecutive.
        """
        batch_size, num_queries = positions_BT.shape
        rows_B, first_slot_C1 = pieces.rows_C if pieces else cache_rows_B, self._first_slots
        if rows_B is not None:
            first_slot_C1 = first_slot_C1.index_select(0, functional.pad(rows_B, (0, 1)))
        if pieces:
            first_query_C1, num_queries, used_C = pieces.first_C1, pieces.longest, pieces.used_C
        elif consecutive:
            used_C = self._used_S.index_select(0, positions_BT[:, -1])
            first_query_C1 = self._running_sum(batch_size, num_queries)
        else:
            first_slot_C1 = functional.pad(first_slot_C1[:-1].repeat_interleave(num_queries), (0, 1))
            used_C = self._used_S.index_select(0, positions_BT.flatten())
            first_query_C1, num_queries = self._running_sum(batch_size * num_queries, 1), 1
        sequences = Sequences(first_query_C1, first_slot_C1, used_C, num_queries, self._num_slots)

        def attend(
            queries_MHD: Tensor, keys_SND: Tensor, values_SND: Tensor, heads: Heads, *, window: int | None
        ) -> Tensor:
            return varlen(queries_MHD, keys_SND, values_SND, sequences, scale=heads.scale, window=window).flatten(1)

        return {window: partial(attend, window=window) for window in windows}

    def _running_sum(self, number: int, step: int) -> Tensor:
        """The running sum of `number` equal steps, from 0 on."""
        if (number, step) not in self._sums:
            stop = (number + 1) * step
            self._sums[number, step] = torch.arange(0, stop, step, dtype=torch.int32, device=self._device)
        return self._sums[number, step]
