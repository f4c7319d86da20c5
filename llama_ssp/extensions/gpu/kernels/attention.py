"""Triton kernels of attention in rounds: a row of the cache is split over as many thread blocks as a GPU needs.

torch's flash attention takes 128 slots at once (256 of narrow heads), and does not split rows that lie one after the
other: a head is one block, and a GPU has more than a hundred multiprocessors. These kernels take 16 slots at once.

    attend_part     a program for each part of a row and key-value head: the queries of its group, over the part's slots
    attend_whole    a program for each query and some dimensions: adds the parts up, weighted by their sums

    row    | part 0: slots 0..15 | part 1: 16..31 | ... | part 7: 112..114 |

Keys and values may be kept in another format than queries (`parts.KeptRows`): each is unpacked where it is used.

A longer row has more parts, and beyond a limit longer ones. The limit depends on the number of heads, and a row's parts
on its own length, which is on the device: never on other rows, or on the size of the cache. Parts are added up in their
order, so that a row gets the same bits every time.

Shapes: Q queries of all rows, H query heads, N key-value heads, G = H / N, D head dim, W width of a kept key or value,
S slots of all rows, C sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.architectures.engine import PART_SLOTS, most_parts
from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait
from llama_ssp.kernels.parts import KeptRows, Sequences, left_of

MOST_ROWS = 64
"""Queries of a tile: the positions of a row times G."""
_LEAST_ROWS = 16
_WIDTH = 32
LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _measures(  # type: ignore[no-untyped-def]
    first_queries, used, row, left, HAS_WINDOW: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr
):
    """Return a row's first query, its numbers of queries and slots, the slot where part 0 begins, and a part's size."""
    first = tl.load(first_queries + row)
    num_queries = tl.load(first_queries + row + 1) - first
    length = tl.load(used + row)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - num_queries - left, 0) // SLOTS * SLOTS
    size = tl.maximum(tl.cdiv(length - begin, SLOTS * PARTS), 1) * SLOTS
    return first, num_queries, length, begin, size


KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Kinds of rows with a scale; others are 0."""


@triton.jit  # type: ignore[untyped-decorator]
def unpacked(rows, starts, dims, is_slot, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the keys or values that begin at some addresses, unpacked."""
    numbers = tl.load(
        rows + starts[:, None] + dims[None, :], mask=is_slot[:, None] & (dims < HEAD_DIM)[None, :], other=0
    )
    if KIND != 0:
        codes = numbers.to(tl.int8, bitcast=True)
        if KIND == 1:
            numbers = codes.to(tl.float32)
        else:  # the bits of a code, moved, are of an fp16 number that is 2^-8 times as large
            bits = (codes.to(tl.int16) << 7) & -16385
            numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        scales = (rows + starts + HEAD_DIM).to(tl.pointer_type(tl.float32))
        numbers *= tl.load(scales, mask=is_slot, other=0.0)[:, None]
    return numbers.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def over_slots(  # type: ignore[no-untyped-def]
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
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Attend from a tile of queries at `positions` to slots of a row, SLOTS at once.

    Returns the sums, the largest scores and the sums of weights. A step of which a query sees nothing leaves its bits
    as they are: sums are multiplied by 2^0, which is 1, and zeros are added.
    """
    dims = tl.arange(0, DIMS)
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    attended = tl.zeros((ROWS, DIMS), dtype=tl.float32)
    for at in range(start, stop, SLOTS):
        slots = at + tl.arange(0, SLOTS)
        here = (first_slot + slots) * slot_stride + head.to(tl.int64) * head_stride
        key = unpacked(keys, here, dims, slots < length, query.dtype, HEAD_DIM, KIND)
        value = unpacked(values, here, dims, slots < length, query.dtype, HEAD_DIM, KIND)
        scores = tl.dot(query, tl.trans(key)) * scale
        is_seen = slots[None, :] <= positions[:, None]
        if HAS_WINDOW:
            is_seen &= slots[None, :] >= positions[:, None] - left
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees nothing here
        weights = tl.exp2(scores - shift[:, None])
        fading = tl.exp2(peak - shift)
        total = total * fading + tl.sum(weights, 1)
        attended = tl.dot(weights.to(value.dtype), value, attended * fading[:, None])
        peak = higher
    return attended, peak, total


@triton.jit(do_not_specialize=["left", "num_parts"])  # type: ignore[untyped-decorator]
def attend_part(  # type: ignore[no-untyped-def]
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
    query_stride,
    query_head_stride,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one row's queries of a group to a part of its slots; `scale` is for powers of 2."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    release(PDL)
    wait(PDL)
    first, num_queries, length, begin, size = _measures(first_queries, used, row, left, HAS_WINDOW, PARTS, SLOTS)
    start = begin + part * size
    stop = tl.minimum(start + size, length)
    if start >= stop:
        return
    # The queries of all positions and heads of the group are the rows of one tile.
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    places, heads = rows // GROUP, head * GROUP + rows % GROUP
    is_query = (places < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first + places).to(tl.int64)
    own = tokens * query_stride + heads * query_head_stride
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
    mine = (tokens * tl.num_programs(1) * GROUP + heads) * num_parts + part
    tl.store(sums + mine, peak + tl.log2(total), mask=places < num_queries)
    attended /= tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(parts + mine[:, None] * HEAD_DIM + dims[None, :], attended, mask=is_query)


@triton.jit(do_not_specialize=["left", "num_parts"])  # type: ignore[untyped-decorator]
def attend_whole(  # type: ignore[no-untyped-def]
    parts,
    sums,
    first_queries,
    used,
    attended,
    left,
    num_parts,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of one query up, in some dimensions of a head."""
    head, row = tl.program_id(1), tl.program_id(2)
    release(PDL)
    wait(PDL)
    first, num_queries, length, begin, size = _measures(first_queries, used, row, left, HAS_WINDOW, PARTS, SLOTS)
    pieces: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    place = tl.program_id(0) // pieces
    if place >= num_queries:
        return
    dims = tl.program_id(0) % pieces * WIDTH + tl.arange(0, WIDTH)
    query = (first + place).to(tl.int64) * tl.num_programs(1) + head
    number = tl.arange(0, PARTS)
    is_part = number < tl.cdiv(length - begin, size)
    found = tl.load(sums + query * num_parts + number, mask=is_part, other=float("-inf"))
    weights = tl.exp2(found - tl.max(found, 0))
    weights /= tl.sum(weights, 0)
    places = (query * num_parts + number)[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(parts + places, mask=is_part[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    whole = tl.sum(values * weights[:, None], 0)
    tl.store(attended + query * HEAD_DIM + dims, whole.to(attended.dtype.element_ty), mask=dims < HEAD_DIM)


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
    """A `VarlenAttention` for at most `MOST_ROWS` / G queries of a sequence; keys and values have the same strides.

    Keys and values are kept as `kept` says; None means in the queries' dtype.
    """
    num_queries, num_heads, head_dim = queries_QHD.shape
    num_kv_heads, num_sequences = keys_SNW.shape[1], len(sequences.used_C)
    group, left = num_heads // num_kv_heads, left_of(window)
    rows = max(int(triton.next_power_of_2(sequences.most_queries * group)), _LEAST_ROWS)
    assert rows <= MOST_ROWS
    assert queries_QHD.stride(2) == keys_SNW.stride(2) == 1
    assert keys_SNW.stride() == values_SNW.stride()
    parts = most_parts(num_kv_heads)
    num_parts = min(parts, triton.cdiv(sequences.most_slots, PART_SLOTS))
    parts_QHCD = queries_QHD.new_empty(num_queries, num_heads, num_parts, head_dim, dtype=torch.float32)
    sums_QHC = queries_QHD.new_empty(num_queries, num_heads, num_parts, dtype=torch.float32)
    attended_QHD = queries_QHD.new_empty(queries_QHD.shape)
    shared: dict[str, int] = {"HEAD_DIM": head_dim, "HAS_WINDOW": left >= 0, "PARTS": parts, "SLOTS": PART_SLOTS}
    shared |= chained(queries_QHD.device)
    attend_part[num_parts, num_kv_heads, num_sequences](
        queries_QHD,
        keys_SNW,
        values_SNW,
        sequences.first_query_C1,
        sequences.first_slot_C1,
        sequences.used_C,
        parts_QHCD,
        sums_QHC,
        scale * LOG2_E,
        left,
        num_parts,
        queries_QHD.stride(0),
        queries_QHD.stride(1),
        keys_SNW.stride(0),
        keys_SNW.stride(1),
        GROUP=group,
        DIMS=max(int(triton.next_power_of_2(head_dim)), PART_SLOTS),
        ROWS=rows,
        **shared,
        KIND=KINDS.get(kept.dtype, 0) if kept else 0,
        num_warps=rows // _LEAST_ROWS,
        num_stages=3,
    )
    attend_whole[sequences.most_queries * triton.cdiv(head_dim, _WIDTH), num_heads, num_sequences](
        parts_QHCD,
        sums_QHC,
        sequences.first_query_C1,
        sequences.used_C,
        attended_QHD,
        left,
        num_parts,
        WIDTH=_WIDTH,
        **shared,
        num_warps=4,
    )
    return attended_QHD
