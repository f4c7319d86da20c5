"""Triton kernels of attention to latents: a text is cut into parts of as many slots, and a part is read for all heads.

    attend_part     a program for each part of a row and some of its queries: scores, and sums of the part's latents
    attend_whole    a program for each query and some numbers of a latent: adds the parts up, weighted by their sums

    slots   | part 0: slots 0..63 | part 1: 64..127 | ... | part 64: 4096..4607 | ...

A short text needs many parts to keep a GPU busy, and sums of parts are written and read again, so that later parts are
longer. Where they begin depends on nothing, and they are added up in their order: a query gets the same bits whatever
other queries, rows and slots there are. Slots that a program's queries do not see are not read. Latents and
rotary keys may be kept in another format than queries (`parts.KeptRows`): each is unpacked where it is used, once as
key and value.

Shapes: B rows, H heads, T positions, Q = H * T queries of a row, S slots, C parts, R numbers of a latent, P of a rotary
key, D = R + P, W width of a kept part of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.architectures.engine import LATENT_PARTS, LATENT_QUERIES, LATENT_SUMS_BYTES, latent_parts
from llama_ssp.extensions.gpu.kernels.attention import KINDS, LOG2_E, unpacked
from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait
from llama_ssp.kernels.parts import KeptRows

_LEAST_ROWS, _SLOTS, _WIDTH, _BLOCK = 16, 16, 32, 16
"""The least queries of a tile, slots of a step, numbers of a latent of a program, and parts that it adds up at once."""


@triton.jit(do_not_specialize=["num_queries", "num_slots", "num_parts"])  # type: ignore[untyped-decorator]
def attend_part(  # type: ignore[no-untyped-def]
    queries,
    latents,
    rotary,
    masks,
    parts,
    sums,
    scale,
    mask_scale,
    num_queries,
    num_positions,
    num_slots,
    num_parts,
    row_stride,
    slot_stride,
    mask_row_stride,
    mask_stride,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    RANKS: tl.constexpr,
    ROTARIES: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT_PARTS: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from some queries of a row to a part of its slots; both scales are for powers of 2."""
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    release(PDL)
    wait(PDL)
    places = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_query = places < num_queries
    numbers, turned = tl.arange(0, RANKS), tl.arange(0, ROTARIES)
    own = (row * num_queries + places) * (RANK + ROTARY)
    is_number = is_query[:, None] & (numbers < RANK)[None, :]
    query = tl.load(queries + own[:, None] + numbers[None, :], mask=is_number, other=0.0)
    is_turned = is_query[:, None] & (turned < ROTARY)[None, :]
    rotated = tl.load(queries + own[:, None] + RANK + turned[None, :], mask=is_turned, other=0.0)
    lines = row * mask_row_stride + (places % num_positions).to(tl.int64) * mask_stride
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    attended = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    size = tl.where(part < SHORT_PARTS, SHORT, LONG)
    start = tl.where(part < SHORT_PARTS, part * SHORT, SHORT_PARTS * SHORT + (part - SHORT_PARTS) * LONG)
    for at in range(start, tl.minimum(start + size, num_slots), SLOTS):
        slots = at + tl.arange(0, SLOTS)
        is_slot = slots < num_slots
        is_pair = is_query[:, None] & is_slot[None, :]
        added = tl.load(masks + lines[:, None] + slots[None, :], mask=is_pair, other=float("-inf")).to(tl.float32)
        is_seen = tl.max(tl.max(added, 1), 0) > float("-inf")
        here = row * row_stride + slots.to(tl.int64) * slot_stride
        is_read = slots < tl.where(is_seen, num_slots, 0)
        latent = unpacked(latents, here, numbers, is_read, query.dtype, RANK, KIND)
        key = unpacked(rotary, here, turned, is_read, query.dtype, ROTARY, KIND)
        scores = tl.dot(rotated, tl.trans(key))
        scores = tl.dot(query, tl.trans(latent), scores) * scale + added * mask_scale
        higher = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a query that sees nothing so far
        weights = tl.exp2(scores - shift[:, None])
        fading = tl.exp2(peak - shift)
        total = total * fading + tl.sum(weights, 1)
        attended = tl.dot(weights.to(latent.dtype), latent, attended * fading[:, None])
        peak = higher
    mine = (row * num_queries + places) * num_parts + part
    tl.store(sums + mine, peak + tl.log2(total), mask=is_query)
    attended /= tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(parts + mine[:, None] * RANK + numbers[None, :], attended, mask=is_number)


@triton.jit(do_not_specialize=["num_parts"])  # type: ignore[untyped-decorator]
def attend_whole(  # type: ignore[no-untyped-def]
    parts, sums, attended, num_parts, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Add the parts of one query up, in some numbers of a latent."""
    release(PDL)
    wait(PDL)
    query = tl.program_id(0).to(tl.int64)  # of more than the 65535 programs that the other numbers may have
    numbers, parted = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for at in range(0, num_parts, BLOCK):
        own = at + parted
        peak = tl.maximum(peak, tl.load(sums + query * num_parts + own, mask=own < num_parts, other=float("-inf")))
    highest = tl.max(peak, 0)
    total, whole = 0.0, tl.zeros((WIDTH,), dtype=tl.float32)
    for at in range(0, num_parts, BLOCK):
        own = at + parted
        found = tl.load(sums + query * num_parts + own, mask=own < num_parts, other=float("-inf"))
        weights = tl.exp2(found - highest)
        places = (query * num_parts + own)[:, None] * RANK + numbers[None, :]
        is_there = (own < num_parts)[:, None] & (numbers < RANK)[None, :]
        values = tl.load(parts + places, mask=is_there, other=0.0)
        total += tl.sum(weights, 0)
        whole += tl.sum(values * weights[:, None], 0)
    whole /= total
    tl.store(attended + query * RANK + numbers, whole.to(attended.dtype.element_ty), mask=numbers < RANK)


def attend(
    queries_BHTD: Tensor, latents_BSW: Tensor, rotary_BSW: Tensor, mask_B1TS: Tensor, scale: float, *, kept: KeptRows
) -> Tensor:
    """A `LatentAttention`, of as many rows and positions at once as have `LATENT_SUMS_BYTES` of sums."""
    num_parts = latent_parts(latents_BSW.shape[1], LATENT_PARTS)
    queries_BQD = queries_BHTD.flatten(1, 2).contiguous()
    (batch_size, num_queries, width), num_slots = queries_BQD.shape, latents_BSW.shape[1]
    num_heads, num_positions = queries_BHTD.shape[1:3]
    rank = latents_BSW.shape[2] - (kept.width(1) - 1)
    assert latents_BSW.stride() == rotary_BSW.stride()
    assert latents_BSW.stride(2) == mask_B1TS.stride(3) == 1
    most = max(LATENT_SUMS_BYTES // (4 * num_heads * num_parts * (rank + 1)), 1)
    if batch_size * num_positions > most:
        rows, positions = max(most // num_positions, 1), min(most, num_positions)
        given = queries_BHTD, latents_BSW, rotary_BSW, mask_B1TS
        found = []
        for queries, latents, rotary, mask in zip(*(part.split(rows) for part in given), strict=True):
            some = zip(queries.split(positions, 2), mask.split(positions, 2), strict=True)
            found.append(torch.cat([attend(one, latents, rotary, own, scale, kept=kept) for one, own in some], 2))
        return torch.cat(found)
    parts_BQCR = queries_BQD.new_empty(batch_size, num_queries, num_parts, rank, dtype=torch.float32)
    sums_BQC = queries_BQD.new_empty(batch_size, num_queries, num_parts, dtype=torch.float32)
    attended_BHTR = queries_BQD.new_empty(batch_size, num_heads, num_positions, rank)
    rows = min(max(int(triton.next_power_of_2(num_queries)), _LEAST_ROWS), LATENT_QUERIES)
    pdl, kind = chained(queries_BQD.device), KINDS.get(kept.dtype, 0)
    attend_part[num_parts, triton.cdiv(num_queries, rows), batch_size](
        queries_BQD,
        latents_BSW,
        rotary_BSW,
        mask_B1TS,
        parts_BQCR,
        sums_BQC,
        scale * LOG2_E,
        LOG2_E,
        num_queries,
        num_positions,
        num_slots,
        num_parts,
        latents_BSW.stride(0),
        latents_BSW.stride(1),
        mask_B1TS.stride(0),
        mask_B1TS.stride(2),
        RANK=rank,
        ROTARY=width - rank,
        RANKS=_padded(rank),
        ROTARIES=_padded(width - rank),
        ROWS=rows,
        SHORT_PARTS=LATENT_PARTS[0],
        SHORT=LATENT_PARTS[1],
        LONG=LATENT_PARTS[2],
        SLOTS=_SLOTS,
        KIND=kind,
        num_warps=8,
        num_stages=1 if kind else 2,
        **pdl,
    )
    attend_whole[batch_size * num_queries, triton.cdiv(rank, _WIDTH)](
        parts_BQCR, sums_BQC, attended_BHTR, num_parts, RANK=rank, WIDTH=_WIDTH, BLOCK=_BLOCK, num_warps=1, **pdl
    )
    return attended_BHTR


def _padded(width: int) -> int:
    return max(int(triton.next_power_of_2(width)), _LEAST_ROWS)
