"""Finds torch's attention by lengths of rows, over a cache in pages: flash attention, split along the keys.

A mask excludes flash attention, and other kernels walk all slots of a row with one thread block for each key-value
head: few blocks for a GPU with a hundred and more multiprocessors. This kernel takes each row's length from the device
instead, reads no slot beyond it, and splits long rows over many blocks.

    runs on     NVIDIA GPUs from Ampere on, fp16 and bf16, heads of up to 256 dimensions, a torch that has it
    elsewhere   masks; see `llama.attention`

Before its first use it is held to a masked attention on this very device.

Shapes: Q queries of all rows, H query heads, N key-value heads, D head dim, X pages of P slots, R rows.
"""

import inspect
import logging
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, starmap
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.sizes import PAGE_SLOTS

_log = logging.getLogger(__name__)

_LARGEST_HEAD = 256
_FIRST_CAPABILITY = 8, 0
_NEEDED = {"window_size", "enable_gqa", "seqused_k", "block_table"}
_TOLERANCE = 0.05
"""Of values of about 1: 16 bits round to 0.004, and a wrong key changes more than this."""


class Heads(NamedTuple):
    """The heads of a layer on this rank: H, N, D, and what scores are multiplied by."""

    num: int
    num_kv: int
    dim: int
    scale: float


class VarlenAttention(Protocol):
    """`torch.nn.attention.varlen.varlen_attn` with pages. The last query of a row sees all of its `seqused_k` slots."""

    def __call__(  # noqa: PLR0913, PLR0917 - torch's
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attend from queries (Q, H, D) to pages (X, P, N, D); returns (Q, H, D)."""


@cache
def find_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
    """Torch's kernel for such heads on a device; None if it does not run there, or not rightly."""
    is_narrow = dtype in {torch.float16, torch.bfloat16}
    if device.type != "cuda" or not is_narrow or head_dim % 8 or head_dim > _LARGEST_HEAD:
        return None
    if torch.version.hip or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return None
    kernel = _torch_s()
    if kernel is None:
        return None
    try:
        heads = Heads(4, 2, head_dim, head_dim**-0.5)
        problem = None if is_right(kernel, device=device, dtype=dtype, heads=heads) else "wrong values"
    except (RuntimeError, TypeError) as error:
        problem = str(error).strip().partition("\n")[0]
    if problem is None:
        return kernel
    _log.warning("continuing with masks, because attention by lengths does not work on %s: %s", device, problem)
    return None


def _torch_s() -> VarlenAttention | None:
    try:
        from torch.nn.attention import varlen  # noqa: PLC0415 - slow to import, and only GPUs need it
    except ImportError:
        return None
    into = getattr(varlen, "varlen_attn_out", None)
    if into is None or not inspect.signature(into).parameters.keys() >= _NEEDED:
        return None

    def attend(query: Tensor, *arguments: Tensor | int, **options: object) -> Tensor:
        # The form without `out` also fills a tensor for dropout in every call.
        attended: Tensor = into(query.new_empty(query.shape), query, *arguments, **options)
        return attended

    return attend


def is_right(attend: VarlenAttention, *, device: torch.device, dtype: torch.dtype, heads: Heads) -> bool:
    """Whether it computes what masks give for rows of two lengths and numbers of queries, with and without a window."""
    num_heads, num_kv_heads, head_dim, scale = heads
    lengths, first_queries = (5, PAGE_SLOTS + 44), (0, 2, 6)
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def numbers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    queries_QHD = some(first_queries[-1], num_heads, head_dim)
    keys_XPND, values_XPND = (some(4, PAGE_SLOTS, num_kv_heads, head_dim) for _ in range(2))
    pages_R2, most = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device), 2 * PAGE_SLOTS
    for window in (None, 4):
        found_QHD = attend(
            queries_QHD, keys_XPND, values_XPND, numbers(first_queries), numbers((0, most, 2 * most)), 4, most,
            scale=scale, window_size=window_size(window), enable_gqa=num_heads != num_kv_heads,
            seqused_k=numbers(lengths), block_table=pages_R2,
        )  # fmt: skip
        for row, (length, own) in enumerate(zip(lengths, starmap(slice, pairwise(first_queries)), strict=True)):
            keys_1NSD, values_1NSD = (
                pool.index_select(0, pages_R2[row]).flatten(0, 1).transpose(0, 1)[None]
                for pool in (keys_XPND, values_XPND)
            )
            distance_QS = torch.arange(length - own.stop + own.start, length)[:, None] - torch.arange(most)
            is_seen_QS = (distance_QS >= 0) & (distance_QS < (window or most))
            wanted_1HQD = functional.scaled_dot_product_attention(
                queries_QHD[own].transpose(0, 1)[None], keys_1NSD, values_1NSD, attn_mask=is_seen_QS.to(device),
                enable_gqa=True, scale=scale,
            )  # fmt: skip
            is_wrong = ~((found_QHD[own] - wanted_1HQD[0].transpose(0, 1)).abs() <= _TOLERANCE)  # so is NaN
            if bool(is_wrong.any()):
                return False
    return True


def window_size(window: int | None) -> tuple[int, int]:
    """The keys to the left and to the right that a query sees, -1 for all, if it sees `window` with its own."""
    return (-1 if window is None else window - 1), 0
