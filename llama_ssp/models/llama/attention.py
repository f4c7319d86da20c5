"""The three ways in which the lean decoder attends over its cache: compiled, by masks, and by the lengths of its rows.

                    compiled               by masks                     by lengths
    kernel          `native.attention`,    torch's, for masked          torch's flash attention by lengths;
                    with rotary and cache  queries                      see `varlen`
    reads           each row up to each    a bucket of slots, some of   each row up to its last position,
                    token's own position   them masked                  in pages
    grouped heads   in the kernel          queries folded into rows     in the kernel
    CUDA graphs     none                   one for each bucket          one for all lengths
    chosen for      CPUs in fp32, where    other CPUs; fp32 on GPUs;    fp16 and bf16 on GPUs that have
                    llvmlite works         older GPUs and torch         the kernel

Rounded inputs need the bits of single steps: the compiled way gives them anyhow, masks position by position.
`LeanRunner` chooses once, when it is built. Each forward prepares one `Attend` for each window of the layers, or one
`LayerAttention`, which also turns queries and keys and writes to the cache.

Shapes: B sequences, T positions, M = B * T tokens, Q = T * G queries of a group, S slots, H query heads, N key-value
heads, G = H / N, D head dim, X = H + 2 N, O = X * D, X pages of P slots, C sequences of the kernel, E = H * D.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels.attention import Attention
from llama_ssp.kernels.layer import TokenPlaces, WholeLayer
from llama_ssp.models.attention import attend_by_position
from llama_ssp.models.cache import CacheView, Workspace
from llama_ssp.models.llama.rotary import PlaceHeads, RmsNorm, norm_heads
from llama_ssp.models.runner import Pieces
from llama_ssp.models.varlen import Heads, VarlenAttention, window_size
from llama_ssp.shapes import static_shape

Attend = Callable[[Tensor, Tensor, Tensor, Heads], Tensor]
"""Maps queries (M, H, D), keys and values as `CacheView.update` returns them, and the heads to (M, H * D)."""


class LayerAttention(Protocol):
    """Attention of one forward, with all that comes between the products around it."""

    def __call__(self, qkv_MO: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]) -> Tensor:
        """Map queries, keys and values of layer `number` to (M, H * D); `norms` are as in `PlaceHeads`."""


class PlacedAttention(NamedTuple):
    """A `LayerAttention` of two parts."""

    place: PlaceHeads
    attend: Attend

    def __call__(self, qkv_MO: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]) -> Tensor:
        """See `LayerAttention`."""
        qkv_MXD = qkv_MO.view(-1, heads.num + 2 * heads.num_kv, heads.dim)
        return self.attend(*self.place(qkv_MXD, number, heads, norms), heads)


def placed_attention(place: PlaceHeads, attend: Mapping[int | None, Attend]) -> dict[int | None, LayerAttention]:
    """The attention of a forward in two parts, by window."""
    return {window: PlacedAttention(place, way) for window, way in attend.items()}


class CompiledAttention(NamedTuple):
    """A `LayerAttention` of one operator, whose bits do not depend on other tokens.

    Attributes:
        attention: the operator.
        freqs_cis_S1P: the rotary factors of all positions.
        positions_BT: of the tokens, contiguous.
        view: of the cache.
        window: how many positions a token sees, including its own.
    """

    attention: Attention
    freqs_cis_S1P: Tensor
    positions_BT: Tensor
    view: CacheView
    window: int | None

    def __call__(self, qkv_MO: Tensor, number: int, heads: Heads, norms: Sequence[RmsNorm]) -> Tensor:
        """See `LayerAttention`."""
        num_heads, num_kv_heads, head_dim, scale = heads

        def split() -> Tensor:
            return qkv_MO.view(-1, num_heads + 2 * num_kv_heads, head_dim)

        if norms:
            norm_heads(split(), heads, norms)
        parts = self.view.buffer(number, lambda: split().narrow(1, num_heads, 2 * num_kv_heads)).parts
        return self.attention(
            qkv_MO, self.freqs_cis_S1P, self.positions_BT, self.view.slots_M, parts, num_heads, scale, self.window or 0
        )

    def with_products(self, layer: WholeLayer, x_ME: Tensor, number: int, heads: Heads) -> Tensor:
        """Layer `number` in one operator, products included."""
        shape = x_ME.shape[0], 2 * heads.num_kv, heads.dim
        parts = self.view.buffer(number, lambda: x_ME.new_empty(shape)).parts
        place = TokenPlaces(self.freqs_cis_S1P, self.positions_BT, self.view.slots_M)
        return layer(x_ME, place, parts, num_heads=heads.num, scale=heads.scale, window=self.window or 0)


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """Attention of one forward by a mask, whose rows are those of the queries of a group.

    With `by_position` the positions of a round are computed one by one.
    """

    mask_B1QS: Tensor
    batch_size: int
    by_position: bool

    def __call__(self, queries_MHD: Tensor, keys_BNSD: Tensor, values_BNSD: Tensor, heads: Heads) -> Tensor:
        """See `Attend`."""
        group = heads.num // heads.num_kv
        grouped_BTNGD = queries_MHD.view(self.batch_size, -1, heads.num_kv, group, heads.dim)
        queries_BNQD = grouped_BTNGD.transpose(1, 2).flatten(2, 3)

        def attend(queries: Tensor, mask: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                queries, keys_BNSD, values_BNSD, attn_mask=mask, scale=heads.scale
            )

        if self.by_position:
            attended_BNQD = attend_by_position(attend, queries_BNQD, self.mask_B1QS, group=group)
        else:
            attended_BNQD = attend(queries_BNQD, self.mask_B1QS)
        attended_BNTGD = attended_BNQD.unflatten(2, (-1, group))
        attended_ME: Tensor = attended_BNTGD.transpose(1, 2).reshape(-1, heads.num * heads.dim)
        return attended_ME


class RowLengths(NamedTuple):
    """What attention by lengths knows of one forward, as its kernel takes it: int32 on the device.

    Attributes:
        used_C: slots that each sequence's last query sees.
        pages_CX: each sequence's pages, in order.
        first_query_C1, first_slot_C1: running sums of the queries and of the slots of the sequences, from 0 on.
        num_queries: of each sequence, the most of any.
        num_slots: of each sequence.
    """

    used_C: Tensor
    pages_CX: Tensor
    first_query_C1: Tensor
    first_slot_C1: Tensor
    num_queries: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class LengthAttention:
    """Attention of one forward by the lengths of its rows."""

    varlen: VarlenAttention
    rows: RowLengths
    window: int | None

    def __call__(self, queries_MHD: Tensor, keys_XPND: Tensor, values_XPND: Tensor, heads: Heads) -> Tensor:
        """See `Attend`."""
        rows = self.rows
        attended_MHD = self.varlen(
            queries_MHD, keys_XPND, values_XPND, rows.first_query_C1, rows.first_slot_C1, rows.num_queries,
            rows.num_slots, scale=heads.scale, window_size=window_size(self.window),
            enable_gqa=heads.num != heads.num_kv, seqused_k=rows.used_C, block_table=rows.pages_CX,
        )  # fmt: skip
        return attended_MHD.flatten(1)


class LengthTables(Workspace):
    """Tables of a paged cache, in which a forward looks up its `RowLengths`.

    Args:
        num_slots: S, whole pages.
    """

    def __init__(self, *, batch_size: int, num_slots: int, page_slots: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self._used_S = torch.arange(1, num_slots + 1, dtype=torch.int32, device=device)
        num_pages = batch_size * num_slots // page_slots
        self._pages_BX = torch.arange(num_pages, dtype=torch.int32, device=device).view(batch_size, -1)
        self._sums: dict[tuple[int, int], Tensor] = {}

    def rows(self, positions_BT: Tensor, *, cache_rows_B: Tensor | None, consecutive: bool) -> RowLengths:
        """Look the rows of a forward up; every token is a sequence of its own if positions are not consecutive."""
        batch_size, num_positions = static_shape(positions_BT)
        pages_CX = self._pages_BX if cache_rows_B is None else self._pages_BX.index_select(0, cache_rows_B)
        num_sequences, num_queries, last_C = batch_size, num_positions, positions_BT[:, -1]
        if not consecutive:
            num_sequences, num_queries, last_C = batch_size * num_positions, 1, positions_BT.flatten()
            pages_CX = pages_CX.repeat_interleave(num_positions, 0)
        return RowLengths(
            used_C=self._used_S.index_select(0, last_C),
            pages_CX=pages_CX,
            first_query_C1=self._running_sum(num_sequences, num_queries),
            first_slot_C1=self._running_sum(num_sequences, self._num_slots),
            num_queries=num_queries,
            num_slots=self._num_slots,
        )

    def rows_of_pieces(self, pieces: Pieces) -> RowLengths:
        """The rows of a packed forward: each piece is a sequence."""
        num_pieces = pieces.rows_C.shape[0]
        return RowLengths(
            used_C=pieces.used_C,
            pages_CX=self._pages_BX.index_select(0, pieces.rows_C),
            first_query_C1=pieces.first_C1,
            first_slot_C1=self._running_sum(num_pieces, self._num_slots),
            num_queries=pieces.longest,
            num_slots=self._num_slots,
        )

    def _running_sum(self, number: int, step: int) -> Tensor:
        if (number, step) not in self._sums:
            stop = (number + 1) * step
            self._sums[number, step] = torch.arange(0, stop, step, dtype=torch.int32, device=self._device)
        return self._sums[number, step]

    def attend(
        self, varlen: VarlenAttention, rows: RowLengths, windows: Iterable[int | None]
    ) -> dict[int | None, Attend]:
        """The attention of a forward for each window of the layers."""
        return {window: LengthAttention(varlen, rows, window) for window in dict.fromkeys(windows)}
