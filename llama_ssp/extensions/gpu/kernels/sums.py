"""Sums over ranks in one launch, in Triton, through memory of each GPU that the other GPUs of the node have mapped.

Each program takes a row or a chunk: it copies its own part to a slot of this rank's memory, says so in the flags of all
ranks, waits for theirs, and adds the parts in the order of the ranks, so that all of them have the same bits.

    memory of a rank    | slots of even sums | slots of odd sums | flags: a count for each slot and rank |

A rank overwrites a slot only after it has seen all flags of the sum in between, which each rank raised once it had read
the slot. A slot has the same place for all shapes, since flags of other slots say nothing about it. Counts wrap around.

Shapes: M rows, E width, R ranks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.architectures.engine import OWN_SUM_BYTES, OWN_SUM_RANKS

NUM_SLOTS, SLOT_BYTES = 128, 2**15
FLAGS_AT = 2 * NUM_SLOTS * SLOT_BYTES
MEMORY_BYTES = FLAGS_AT + 4 * NUM_SLOTS * OWN_SUM_RANKS
_CHUNK = 1024
ENDLESS = 2**62  # Looks at the flag of another rank.


@triton.jit(do_not_specialize=["patience"])  # type: ignore[untyped-decorator]
def sum_kernel(  # type: ignore[no-untyped-def]
    values,
    residual,
    weight,
    normed,
    memories,
    counts,
    num_values,
    span,
    eps,
    patience,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    """Sum `span` values over the ranks, in place; or add the sum to the residual, in place, and normalize that.

    A rank that waits for more than `patience` looks at flags gives NaN.
    """
    slot = tl.program_id(0)
    places = tl.arange(0, PLACES)
    at = slot.to(tl.int64) * span + places
    is_place = (places < span) if residual is not None else (at < num_values)
    ranks = tl.arange(0, RANKS)
    is_rank = ranks < SIZE
    dtype = values.dtype.element_ty
    count = tl.load(counts + slot) + 1
    FLAGS_AT: tl.constexpr = 2 * NUM_SLOTS * SLOT_BYTES
    first_byte = ((count & 1) * NUM_SLOTS + slot) * SLOT_BYTES
    own = (tl.load(memories + RANK) + first_byte).to(tl.pointer_type(dtype))
    tl.store(tl.multiple_of(own, 16) + places, tl.load(values + at, mask=is_place, other=0.0), mask=is_place)
    tl.debug_barrier()  # all threads have written, which the releases below cover
    first_flag = FLAGS_AT + 4 * SIZE * slot
    of_ranks = (tl.load(memories + ranks, mask=is_rank, other=0) + first_flag).to(tl.pointer_type(tl.int32))
    zeros_R = tl.zeros([RANKS], dtype=tl.int32)
    tl.atomic_xchg(of_ranks + RANK, zeros_R + count, mask=is_rank, sem="release", scope="sys")
    own_flags = (tl.load(memories + RANK) + first_flag).to(tl.pointer_type(tl.int32)) + ranks
    looks, behind = patience, -1
    while (behind < 0) & (looks > 0):
        seen_R = tl.atomic_add(own_flags, zeros_R, mask=is_rank, sem="acquire", scope="sys")
        behind = tl.min(tl.where(is_rank, seen_R - count, 0), 0)
        looks -= 1
    tl.debug_barrier()  # the flags that some threads have acquired are all threads' now
    total = tl.zeros([PLACES], dtype=tl.float32)
    for other in tl.static_range(SIZE):
        theirs = (tl.load(memories + other) + first_byte).to(tl.pointer_type(dtype))
        part = tl.load(tl.multiple_of(theirs, 16) + places, mask=is_place, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    total = tl.where(behind < 0, float("nan"), total).to(dtype)
    if residual is not None:
        before = tl.load(residual + at, mask=is_place, other=0.0)
        total = (before.to(tl.float32) + total.to(tl.float32)).to(dtype)
        tl.store(residual + at, total, mask=is_place)
        exact = total.to(tl.float32)
        factor = tl.rsqrt(tl.sum(exact * exact, 0) / span + eps)
        factors = tl.load(weight + places, mask=is_place, other=0.0).to(tl.float32)
        tl.store(normed + at, (exact * factor * factors).to(dtype), mask=is_place)
    else:
        tl.store(values + at, total, mask=is_place)
    tl.store(counts + slot, count)


@dataclass(frozen=True, kw_only=True)
class PeerSums:
    """The kernel over the memories of a group, as `OwnSums`; one for all its sums, which run one after another.

    Attributes:
        memories_R: the addresses of all ranks' memories, as this rank has mapped them.
        counts: the sums of each slot so far, (NUM_SLOTS,) in int32, this rank's own.
        patience: see `sum_kernel`.
    """

    rank: int
    memories_R: Tensor
    counts: Tensor
    patience: int = ENDLESS

    def takes(self, values: Tensor) -> bool:
        """Whether the kernel sums these values; by format and size alone, which ranks share."""
        is_known = values.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return is_known and 0 < values.nbytes <= OWN_SUM_BYTES

    def takes_rows(self, part_ME: Tensor) -> bool:
        """Whether it also adds and normalizes rows like these, each in a slot of its own."""
        num_rows, width = part_ME.shape
        return self.takes(part_ME) and num_rows <= NUM_SLOTS and width * part_ME.itemsize <= SLOT_BYTES

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum values over the ranks in their order, in place if they are contiguous; the same bits on all ranks."""
        values, number = values.contiguous(), values.numel()
        sum_kernel[(triton.cdiv(number, _CHUNK),)](
            values,
            None,
            None,
            None,
            self.memories_R,
            self.counts,
            number,
            _CHUNK,
            0.0,
            self.patience,
            PLACES=_CHUNK,
            num_warps=4,
            **self._group,
        )
        return values

    def add_norm(self, part_ME: Tensor, x_ME: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Add the sum of the ranks' parts to x in place, and return its RMS norm, to the bits of `add_norm`."""
        (num_rows, width), part_ME = part_ME.shape, part_ME.contiguous()
        normed_ME = torch.empty_like(part_ME)
        sum_kernel[(num_rows,)](
            part_ME,
            x_ME,
            weight_E,
            normed_ME,
            self.memories_R,
            self.counts,
            part_ME.numel(),
            width,
            eps,
            self.patience,
            PLACES=triton.next_power_of_2(width),
            num_warps=8,
            **self._group,
        )
        return normed_ME

    @property
    def _group(self) -> dict[str, int]:
        size = len(self.memories_R)
        ranks = triton.next_power_of_2(size)
        return {"RANK": self.rank, "SIZE": size, "RANKS": ranks, "NUM_SLOTS": NUM_SLOTS, "SLOT_BYTES": SLOT_BYTES}
