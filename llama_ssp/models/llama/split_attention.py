"""Attention by lengths for several sequences: with our kernels where torch's would leave much of the GPU idle.

torch's kernel may split the slots of one sequence only (see `models.varlen`). Unsplit it has a thread block for each
head of each sequence, which walks all slots. Published times of 8 queries with 12 heads over 4096 slots are 4 times
those of a split one (pull request 193 of vLLM's flash-attention). Which kernel serves a forward follows from its shapes
alone, so it is the same in every run:

    one sequence                                  torch's, which splits
    several, long, fewer blocks than a GPU needs  ours
    several otherwise, and prompts                torch's, unsplit

This module imports Triton; CPU builds of torch come without.
"""

import torch
from torch import Tensor

from llama_ssp.models.llama import split_kernels
from llama_ssp.models.varlen import CHECKED, Heads, VarlenAttention, fault_of

ENOUGH_BLOCKS = 128
"""GPUs that torch's kernel runs on have about so many multiprocessors."""
LONG_SLOTS = 2048
"""Of the cache: a block walks fewer in about the time of a second kernel."""


class SplitAttention:
    """A `VarlenAttention`: ours for few queries of several sequences, torch's for others.

    Args:
        torch_s: its kernel.
        heads: of every layer.
    """

    def __init__(self, torch_s: VarlenAttention, heads: Heads) -> None:
        self._torch_s, self._heads = torch_s, heads

    def __call__(  # noqa: PLR0913, PLR0917 - torch's
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        """See `VarlenAttention`."""
        attend = split_kernels.attend if self.serves(len(seqused_k), max_q, max_k) else self._torch_s
        return attend(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size,
            enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
        )  # fmt: skip

    def serves(self, num_rows: int, num_queries: int, num_slots: int) -> bool:
        """Whether ours is for so many queries in each of so many rows of the cache."""
        fits = num_queries * self._heads.num <= split_kernels.MOST_ROWS * self._heads.num_kv
        return fits and num_rows > 1 and num_slots >= LONG_SLOTS and num_rows * self._heads.num < ENOUGH_BLOCKS


def try_split(
    torch_s: VarlenAttention, heads: Heads, *, device: torch.device, dtype: torch.dtype, has_windows: bool
) -> SplitAttention:
    """Take ours for these heads; RuntimeError if they do not compute what a mask gives."""
    most = split_kernels.MOST_ROWS * heads.num_kv // heads.num
    checked = [queries for queries in CHECKED if max(queries) <= most]
    fault = fault_of(
        split_kernels.attend, device=device, dtype=dtype, heads=heads, has_windows=has_windows, checked=checked
    )
    if fault:
        raise RuntimeError(f"the kernel of split attention gives {fault}")
    return SplitAttention(torch_s, heads)
