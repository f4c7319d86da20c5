"""Triton kernels of attention whose sums have one order, whatever the rows and positions: for `reproducible=true`.

`attention` lets parts grow with a row, and a tile with the positions of a round. Here a part has a number of slots that
depends on the model alone, and begins where a row begins; a tile has one number of rows for single tokens, rounds and
prompts, which pass through it in groups of positions.

    row        | part 0: slots 0..63 | part 1: 64..127 | ... | part 9: 576..600 |
    positions  | group 0: 0..7 | group 1: 8..15 | ... | group 63: 504..511 |      of 4 queries a key-value head

    attend_equal_part    a program for each part, key-value head and group of positions of a row
    join_parts           a program for each query and some dimensions: adds the parts up, the first one first

What a query does not see has a weight of 0, and leaves the bits of its sums as they are: later slots, parts of other
queries, and parts before a window. So a query has the bits that it has alone.

Shapes: Q queries of all rows, H query heads, N key-value heads, G = H / N, D head dim, W width of a kept key or value,
S slots of all rows, C groups at once, M rows of a tile, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.architectures.engine import EQUAL_PARTS_BYTES, PART_SLOTS, equal_part_slots, equal_tile_rows
from llama_ssp.extensions.gpu.kernels.attention import KINDS, LOG2_E, over_slots
from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait
from llama_ssp.kernels.parts import KeptRows, Sequences, left_of

_WIDTH, _JOINED = 32, 32
"""Dimensions that a program of `join_parts` computes, and the parts that it reads at once."""
_MOST_GROUPS = 65535
"""The most programs along the last axis of a grid."""


@triton.jit  # type: ignore[untyped-decorator]
def _group(  # type: ignore[no-untyped-def]
    first_queries, used, left, number, num_groups, HAS_WINDOW: tl.constexpr, POSITIONS: tl.constexpr
):
    """Return a group's row, first query, number of queries, slots up to the last query's own, and first seen slot."""
    row = number // num_groups
    last = tl.load(first_queries + row + 1)
    first = tl.load(first_queries + row) + number % num_groups * POSITIONS
    num_queries = tl.minimum(last - first, POSITIONS)
    length = tl.load(used + row) - (last - first - num_queries)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - num_queries - left, 0)
    return row, first, num_queries, length, begin


@triton.jit(do_not_specialize=["left", "num_parts", "first_group", "num_groups"])  # type: ignore[untyped-decorator]
def attend_equal_part(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    first_queries,
    first_slots,
    used,
    parts,
    sums,
    scale,
    left,
    num_parts,
    first_group,
    num_groups,
    query_stride,
    query_head_stride,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PART: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from a group of one row's positions to a part of its slots; `scale` is for powers of 2."""
    part, head, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    release(PDL)
    wait(PDL)
    row, first, num_queries, length, begin = _group(
        first_queries, used, left, first_group + place, num_groups, HAS_WINDOW, ROWS // GROUP
    )
    start = part * PART
    stop = tl.minimum(start + PART, length)
    if (num_queries <= 0) | (start >= stop) | (start + PART <= begin):
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    places, heads = rows // GROUP, head * GROUP + rows % GROUP
    is_query = (places < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    own = (first + places).to(tl.int64) * query_stride + heads * query_head_stride
    query = tl.load(queries + own[:, None] + dims[None, :], mask=is_query, other=0.0)
    positions = length - num_queries + places
    first_slot = tl.load(first_slots + row).to(tl.int64)
    attended, peak, total = over_slots(
        query,
        keys,
        values,
        positions,
        start,
        stop,
        length,
        first_slot,
        head,
        scale,
        left,
        slot_stride,
        head_stride,
        HEAD_DIM,
        DIMS,
        HAS_WINDOW,
        SLOTS,
        ROWS,
        KIND,
    )
    mine = ((place.to(tl.int64) * tl.num_programs(1) + head) * ROWS + rows) * num_parts + part
    tl.store(sums + mine, peak + tl.log2(total), mask=places < num_queries)
    attended /= tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(parts + mine[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_query)


@triton.jit(do_not_specialize=["left", "num_parts", "first_group", "num_groups"])  # type: ignore[untyped-decorator]
def join_parts(  # type: ignore[no-untyped-def]
    parts,
    sums,
    first_queries,
    used,
    attended,
    left,
    num_parts,
    first_group,
    num_groups,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    JOINED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of one query up, in some dimensions of a head; JOINED parts at once, from the row's first on."""
    head, place = tl.program_id(1), tl.program_id(2)
    release(PDL)
    wait(PDL)
    _, first, num_queries, length, begin = _group(
        first_queries, used, left, first_group + place, num_groups, HAS_WINDOW, ROWS // GROUP
    )
    pieces: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    position = tl.program_id(0) // pieces
    if position >= num_queries:
        return
    dims = tl.program_id(0) % pieces * WIDTH + tl.arange(0, WIDTH)
    tile = place.to(tl.int64) * (tl.num_programs(1) // GROUP) + head // GROUP
    mine = (tile * ROWS + position * GROUP + head % GROUP) * num_parts
    peak, total = tl.full((), float("-inf"), dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    whole = tl.zeros((WIDTH,), dtype=tl.float32)
    for at in range(begin // (PART * JOINED) * JOINED, tl.cdiv(length, PART), JOINED):
        number = at + tl.arange(0, JOINED)
        is_part = (number * PART < length) & (number * PART + PART > begin)
        found = tl.load(sums + mine + number, mask=is_part, other=float("-inf"))
        places = (mine + number)[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(parts + places, mask=is_part[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        higher = tl.maximum(peak, tl.max(found, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # no part so far that the query sees
        weights, fading = tl.exp2(found - shift), tl.exp2(peak - shift)
        total = total * fading + tl.sum(weights, 0)
        whole = whole * fading + tl.sum(values * weights[:, None], 0)
        peak = higher
    target = ((first + position).to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM + dims
    tl.store(attended + target, (whole / total).to(attended.dtype.element_ty), mask=dims < HEAD_DIM)


def attend(
    queries_QHD: Tensor,
    keys_SNW: Tensor,
    values_SNW: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
    kept: KeptRows | None = None,
) -> Tensor:
    """A `VarlenAttention` for any number of queries; see `attention.attend`.

    As many groups run at once as have `EQUAL_PARTS_BYTES` of sums.
    """
    (_, num_heads, head_dim), num_kv_heads = queries_QHD.shape, keys_SNW.shape[1]
    assert queries_QHD.stride(2) == keys_SNW.stride(2) == 1
    assert keys_SNW.stride() == values_SNW.stride()
    group, left, part = num_heads // num_kv_heads, left_of(window), equal_part_slots(num_kv_heads)
    rows = equal_tile_rows(group)
    positions = min(rows // group, sequences.most_queries)
    num_groups = triton.cdiv(sequences.most_queries, rows // group)
    num_parts, num_all = triton.cdiv(sequences.most_slots, part), len(sequences.used_C) * num_groups
    group_bytes = 4 * num_kv_heads * rows * num_parts * (head_dim + 1)
    at_once = min(max(EQUAL_PARTS_BYTES // group_bytes, 1), num_all, _MOST_GROUPS)
    parts_CNMPD = queries_QHD.new_empty(at_once, num_kv_heads, rows, num_parts, head_dim, dtype=torch.float32)
    sums_CNMP = parts_CNMPD.new_empty(parts_CNMPD.shape[:-1])
    attended_QHD = queries_QHD.new_empty(queries_QHD.shape)
    shared: dict[str, int] = {"GROUP": group, "HEAD_DIM": head_dim, "HAS_WINDOW": left >= 0, "PART": part, "ROWS": rows}
    shared |= chained(queries_QHD.device)
    for first in range(0, num_all, at_once):
        number = min(at_once, num_all - first)
        attend_equal_part[num_parts, num_kv_heads, number](
            queries_QHD,
            keys_SNW,
            values_SNW,
            sequences.first_query_C1,
            sequences.first_slot_C1,
            sequences.used_C,
            parts_CNMPD,
            sums_CNMP,
            scale * LOG2_E,
            left,
            num_parts,
            first,
            num_groups,
            queries_QHD.stride(0),
            queries_QHD.stride(1),
            keys_SNW.stride(0),
            keys_SNW.stride(1),
            DIMS=max(int(triton.next_power_of_2(head_dim)), PART_SLOTS),
            SLOTS=PART_SLOTS,
            KIND=KINDS.get(kept.dtype, 0) if kept else 0,
            num_warps=rows // 16,
            num_stages=3,
            **shared,
        )
        join_parts[positions * triton.cdiv(head_dim, _WIDTH), num_heads, number](
            parts_CNMPD,
            sums_CNMP,
            sequences.first_query_C1,
            sequences.used_C,
            attended_QHD,
            left,
            num_parts,
            first,
            num_groups,
            JOINED=_JOINED,
            WIDTH=_WIDTH,
            num_warps=4,
            **shared,
        )
    return attended_QHD
