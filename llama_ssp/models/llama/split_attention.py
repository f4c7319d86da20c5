"""Attention by lengths for few heads: with our kernels where torch's would leave much of the GPU idle.

Ours are compared with a mask and timed against torch's when a model is loaded. They serve few queries of few heads,
as a round has them; prompts, many rows, and short caches stay with torch's kernel, which reads more slots at once.

This module imports Triton; CPU builds of torch come without.
"""

import logging
from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from llama_ssp.architectures.sizes import PAGE_SLOTS
from llama_ssp.models.llama import split_kernels
from llama_ssp.models.llama.trials import made_on, replay_s
from llama_ssp.models.varlen import Heads, VarlenAttention, is_right, window_size

_log = logging.getLogger(__name__)

ENOUGH_BLOCKS = 128
"""GPUs that torch's kernel runs on have about so many multiprocessors."""
_SLOTS_AT_ONCE = {64: 256, 128: 128, 256: 64}
"""What a block of torch's kernel takes, by the widest head."""
_NUM_SLOTS = 2048
_TIMED_SLOTS, _TIMED_QUERIES, _TIMED_LAYERS = (512, _NUM_SLOTS), (1, 5), 8


def torch_s_blocks(*, num_rows: int, num_heads: int, num_slots: int, head_dim: int) -> int:
    """The most thread blocks that torch's kernel can split few queries over."""
    at_once = next(slots for widest, slots in _SLOTS_AT_ONCE.items() if head_dim <= widest)
    return num_rows * num_heads * -(-num_slots // at_once)


def has_few(heads: Heads) -> bool:
    """Whether torch's kernel leaves much of a GPU idle for one row of `_NUM_SLOTS`."""
    blocks = torch_s_blocks(num_rows=1, num_heads=heads.num, num_slots=_NUM_SLOTS, head_dim=heads.dim)
    return blocks < ENOUGH_BLOCKS


class SplitAttention:
    """A `VarlenAttention`: ours for few queries of few heads, torch's for others.

    Args:
        torch_s: its kernel.
        heads: of every layer.

    Attributes:
        is_ours: whether it uses ours at all.
    """

    def __init__(self, torch_s: VarlenAttention, heads: Heads) -> None:
        self._torch_s, self._heads = torch_s, heads
        self.is_ours = True

    def __call__(  # noqa: PLR0913, PLR0917 - torch's
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        """See `VarlenAttention`."""
        attend = split_kernels.attend if self._serves(len(seqused_k), max_q, max_k) else self._torch_s
        return attend(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size,
            enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
        )  # fmt: skip

    def _serves(self, num_rows: int, num_queries: int, num_slots: int) -> bool:
        """Whether ours is for so many queries in each of so many rows of the cache."""
        num_heads, num_kv_heads, head_dim, _ = self._heads
        if not self.is_ours or num_queries * num_heads > split_kernels.MOST_ROWS * num_kv_heads:
            return False
        of_a_row = torch_s_blocks(num_rows=1, num_heads=num_heads, num_slots=num_slots, head_dim=head_dim)
        return num_heads < of_a_row and num_rows * of_a_row < ENOUGH_BLOCKS  # a single step needs no second kernel

    def choices(self, device: torch.device, dtype: torch.dtype) -> dict[str, list[int]]:
        """What was chosen, as `trials.choices_of` gives it: the slots of a step, or none."""
        return {self._key(device, dtype): [split_kernels.SLOTS] if self.is_ours else []}

    def use_choices(self, choices: Mapping[str, list[int]], device: torch.device, dtype: torch.dtype) -> None:
        """Use an earlier choice; see `trials.use_choices`."""
        wanted = choices.get(self._key(device, dtype))
        if wanted not in (None, [], [split_kernels.SLOTS]):
            raise ValueError(f"it has no attention {wanted}")
        if wanted is not None:
            self.is_ours = bool(wanted)

    def _key(self, device: torch.device, dtype: torch.dtype) -> str:
        number = f"{self._heads.num} over {self._heads.num_kv} heads of {self._heads.dim}"
        return f"{made_on(device)}: attention, {number}, {str(dtype).removeprefix('torch.')}"


@torch.inference_mode()
def try_split(torch_s: VarlenAttention, heads: Heads, *, device: torch.device, dtype: torch.dtype) -> SplitAttention:
    """Take ours for these heads if they are not slower; RuntimeError if they do not compute what a mask gives."""
    if not is_right(split_kernels.attend, device=device, dtype=dtype, heads=heads):
        raise RuntimeError("the kernel of split attention is wrong on this device")
    chosen = SplitAttention(torch_s, heads)
    ours_s, torch_s_s = (
        seconds_of(attend, heads, device=device, dtype=dtype) for attend in (split_kernels.attend, torch_s)
    )
    chosen.is_ours = ours_s <= torch_s_s
    _log.debug("attention of %s: %.1f us split by us, %.1f us by torch", heads, 1e6 * ours_s, 1e6 * torch_s_s)
    return chosen


def seconds_of(attend: VarlenAttention, heads: Heads, *, device: torch.device, dtype: torch.dtype) -> float:
    """The least time of a layer's attention, summed over short and long rows, and single steps and verification."""
    return sum(
        _seconds(attend, heads, num_slots=num_slots, num_queries=num_queries, device=device, dtype=dtype)
        for num_slots, num_queries in product(_TIMED_SLOTS, _TIMED_QUERIES)
    )


def _seconds(
    attend: VarlenAttention,
    heads: Heads,
    *,
    num_slots: int,
    num_queries: int,
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """The least time for a full row, whose slots lie as in a cache; each layer has its own."""
    num_pages = num_slots // PAGE_SLOTS

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    queries_THD = torch.zeros(num_queries, heads.num, heads.dim, dtype=dtype, device=device)
    caches = torch.zeros(
        _TIMED_LAYERS, 2, heads.num_kv, num_pages, PAGE_SLOTS, heads.dim, dtype=dtype, device=device
    ).permute(0, 1, 3, 4, 2, 5)
    rows, slots, used = numbers(0, num_queries), numbers(0, num_slots), numbers(num_slots)
    pages = numbers(*range(num_pages))

    def run() -> None:
        for keys_XPND, values_XPND in caches:
            attend(
                queries_THD, keys_XPND, values_XPND, rows, slots, num_queries, num_slots, scale=heads.scale,
                window_size=window_size(None), enable_gqa=heads.num != heads.num_kv, seqused_k=used,
                block_table=pages[None],
            )  # fmt: skip

    return replay_s(run) / _TIMED_LAYERS
