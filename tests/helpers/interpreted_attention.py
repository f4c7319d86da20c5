"""Computes split attention in Triton's interpreter, and holds it to plain operators; for `interpreted_kernels`."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.models.llama import split_attention, split_kernels
from llama_ssp.models.varlen import Heads, VarlenAttention, window_size
from tests.helpers.varlen_attention import varlen_attention

CPU = torch.device("cpu")
DTYPE = torch.float16
"""The interpreter computes no products in bf16."""
PAGE = 32
"""Slots of a page: fewer than of a cache, so that short rows have several."""


def assert_near(found: Tensor, wanted: Tensor, *, tolerance: float = 0.01) -> None:
    assert found.shape == wanted.shape
    assert ((found - wanted).abs() <= tolerance * wanted.abs().max()).all()


class Split(split_attention.SplitAttention):
    """Ours for all forwards that it can serve, also of caches that are too short for it to gain time."""

    num_served = 0

    def serves(self, num_rows: int, num_queries: int, num_slots: int) -> bool:
        serves = super().serves(num_rows, num_queries, max(num_slots, split_attention.LONG_SLOTS))
        self.num_served += serves
        return serves


def by_lengths(
    attend: VarlenAttention, heads: Heads, *, queries: Sequence[int], lengths: Sequence[int], window: int | None
) -> Tensor:
    """Attention of rows of so many queries and slots, whose pages lie as in a cache; the same values for each call."""
    generator = torch.Generator().manual_seed(1)
    num_pages = -(-max(lengths) // PAGE)

    def numbers(values: Iterable[int]) -> Tensor:
        return torch.tensor([*values], dtype=torch.int32)

    cache = torch.randn(2, heads.num_kv, len(lengths) * num_pages, PAGE, heads.dim, generator=generator).to(DTYPE)
    tokens = torch.randn(len(lengths), 8, heads.num, heads.dim, generator=generator).to(DTYPE)
    # The last queries of a row are the same, however many it has.
    own = torch.cat([row[8 - number :] for row, number in zip(tokens, queries, strict=True)])
    keys, values = cache.permute(0, 2, 3, 1, 4).unbind()
    pages = numbers(range(len(lengths) * num_pages)).flip(0).view(len(lengths), -1)
    slots = num_pages * PAGE
    firsts, ends = accumulate(queries, initial=0), range(0, (len(lengths) + 1) * slots, slots)
    return attend(
        own, keys, values, numbers(firsts), numbers(ends), max(queries), slots, scale=heads.scale,
        window_size=window_size(window), enable_gqa=heads.num != heads.num_kv, seqused_k=numbers(lengths),
        block_table=pages,
    )  # fmt: skip


def split_rows() -> None:
    """Rows of any length, with and without a window; the last query of a row gets the same bits alone.

    With few parts, those of longer rows have several steps.
    """
    whole = split_kernels.most_parts(1)
    for most, (num, num_kv, dim), window in (
        (128, (1, 1, 16), None),
        (4, (6, 2, 24), 3),
        (4, (8, 1, 16), 40),
    ):
        split_kernels._NUM_PROGRAMS = most
        heads = Heads(num, num_kv, dim, dim**-0.5)
        for queries, lengths in (((1, 1, 1), (1, 17, 70)), ((5, 2, 5), (5, 16, 65))):
            found, wanted = (
                by_lengths(attend, heads, queries=queries, lengths=lengths, window=window)
                for attend in (split_kernels.attend, varlen_attention)
            )
            assert_near(found, wanted, tolerance=2e-3)
        if window is None:
            one, five = (
                by_lengths(split_kernels.attend, heads, queries=(number,), lengths=(70,), window=None)
                for number in (1, 5)
            )
            assert torch.equal(one[-1], five[-1])
    split_kernels._NUM_PROGRAMS = whole


def choice_of_attention() -> None:
    """It is compared with a mask, and serves few queries of several long rows with few heads: by its shapes alone."""
    few: Any = Heads(2, 1, 16, 0.25)
    tried = partial(split_attention.try_split, varlen_attention, few, device=CPU, dtype=DTYPE, has_windows=True)
    chosen = tried()
    cases = {
        (2, 1, 2048): True, (2, 32, 2048): True, (63, 1, 4096): True,
        (1, 1, 2048): False, (2, 33, 2048): False, (64, 1, 2048): False, (2, 1, 1792): False,
    }  # fmt: skip
    assert {case: chosen.serves(*case) for case in cases} == cases
    ours: Any = split_kernels
    right = split_kernels.attend
    ours.attend = lambda *arguments, **options: right(*arguments, **options) * 1.2
    with pytest.raises(RuntimeError, match="split attention gives wrong values in row 0 where rows have 1 queries"):
        tried()
    ours.attend = right
