"""Attention by lengths of rows, over a cache in pages: torch's flash attention, and ours where it would be slow.

A mask excludes flash attention, and other kernels walk all slots of a row with one thread block for each key-value
head: few blocks for a GPU with a hundred and more multiprocessors. This kernel takes each row's length from the device
instead, and reads no slot beyond it. For one sequence torch splits the slots over many blocks. For more it must not:
split, torch 2.13 writes the first sequence only (issue 194167 of pytorch). Unsplit, a block walks all slots of its row:
8 queries with 12 heads over 4096 slots took 4 times as long (pull request 193 of vLLM's flash-attention). The shapes of
a forward alone decide, so it is the same kernel in every run:

    one sequence, more than a page of cache       torch's, which splits
    several, long, fewer blocks than a GPU needs  ours (`attention_gpu`)
    others, and prompts                           torch's, unsplit

Keys and values that are kept in another format than queries are ours to read too, up to a round's queries; torch's
kernel gets a copy of all pages in the queries' format (`unpacking`).

It runs where `settings.layout.reads_by_length` says so, which plans ask too, if torch has it; elsewhere masks are
used (see `models.llama.attention`). Before its first use each kernel is held to a masked attention on this very device,
with the model's own heads.

Shapes: Q queries of all rows, H query heads, N key-value heads, D head dim, X pages of P slots, R rows.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from torch import Tensor

from llama_ssp.kernels.between import Heads
from llama_ssp.kernels.rows import KeptRows
from llama_ssp.ranks.gpu import ends_run
from llama_ssp.settings.layout import PAGE_SLOTS, reads_by_length

_log = logging.getLogger(__name__)

_NEEDED = {"window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
_TOLERANCE = 0.05
"""Of values of about 1: 16 bits round to 0.004, and a wrong key changes more than this."""
CHECKED = ((1,), (5,), (1, 1, 1), (5, 5, 5), (4, 1, 70))
"""Queries of each row, as forwards have them: steps and rounds of one row and of three, and packed prompts."""
_SPREAD = 6.0
"""Of the scores."""
_CHECKED_LENGTHS = 4 * PAGE_SLOTS - 24, PAGE_SLOTS + 44, 77
ENOUGH_BLOCKS = 128
"""GPUs that torch's kernel runs on have about so many multiprocessors."""
LONG_SLOTS = 2048
"""Of the cache: a block walks fewer in about the time of a second kernel."""


VarlenAttention = Callable[..., Tensor]
"""`torch.nn.attention.varlen.varlen_attn` with pages: maps queries (Q, H, D) and pages (X, P, N, D) to (Q, H, D).

The last query of a row sees all of its `seqused_k` slots.
"""


@cache
def find_varlen(
    device: torch.device, dtype: torch.dtype, heads: Heads, *, rounds_inputs: bool = False, has_windows: bool = False
) -> VarlenAttention | None:
    """Torch's kernel for such heads on a device; None if it does not run there, or not rightly."""
    if not reads_by_length(
        capability=capability_of(device), value_bytes=dtype.itemsize, head_dim=heads.dim, rounds_inputs=rounds_inputs
    ):
        return None
    if (kernel := torch_attention()) is None:
        return None
    try:
        problem = fault_of(kernel, device=device, dtype=dtype, heads=heads, has_windows=has_windows)
    except (RuntimeError, TypeError) as error:
        if ends_run(error):
            raise
        problem = str(error).strip().partition("\n")[0]
    if problem is None:
        return kernel
    _log.warning("continuing with masks, because attention by lengths does not work on %s: %s", device, problem)
    return None


def capability_of(device: torch.device) -> float:
    """The compute capability of an NVIDIA GPU, such as 8.6; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip:
        return 0.0
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def torch_attention() -> VarlenAttention | None:
    """The kernel of this torch; None if it has none that can be told not to split."""
    try:
        from torch.nn.attention import varlen  # noqa: PLC0415 - slow to import, and only GPUs need it
    except ImportError:
        return None
    into = getattr(varlen, "varlen_attn_out", None)
    if into is None or not inspect.signature(into).parameters.keys() >= _NEEDED:
        return None

    def attend(query: Tensor, *arguments: Any, seqused_k: Tensor, **options: object) -> Tensor:  # noqa: ANN401 - torch's
        *_, num_slots = arguments
        num_splits = None if len(seqused_k) == 1 and num_slots > PAGE_SLOTS else 1
        attended = query.new_empty(query.shape)  # the form without `out` also fills a tensor for dropout in every call
        into(attended, query, *arguments, seqused_k=seqused_k, num_splits=num_splits, **options)
        return attended

    return attend


def unpacking(torch_s: VarlenAttention, kept: KeptRows) -> VarlenAttention:
    """Attention over pages that are kept so: all of them are unpacked."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, *arguments: Any, **options: Any) -> Tensor:  # noqa: ANN401 - torch's
        numbers = (kept.unpack(pages, query.dtype) for pages in (keys, values))
        return torch_s(query, *numbers, *arguments, **options)

    return attend


def over_more_blocks(
    torch_s: VarlenAttention,
    heads: Heads,
    *,
    device: torch.device,
    dtype: torch.dtype,
    has_windows: bool,
    kept: KeptRows,
) -> VarlenAttention:
    """Torch's kernel, and ours for the shapes that `serves` names; RuntimeError if ours is wrong for these heads.

    Ours serves all shapes that it can where keys and values are kept in another format.
    """
    from llama_ssp.kernels import attention_gpu  # noqa: PLC0415 - imports Triton

    most_queries = attention_gpu.MOST_ROWS * heads.num_kv // heads.num
    checked = [queries for queries in CHECKED if max(queries) <= most_queries]
    ours, reads_codes = partial(attention_gpu.attend, kept=kept), kept.dtype is not dtype
    if fault := fault_of(
        ours, device=device, dtype=dtype, heads=heads, has_windows=has_windows, checked=checked, kept=kept
    ):
        raise RuntimeError(f"the kernel of split attention gives {fault}")

    def attend(query: Tensor, *arguments: Any, seqused_k: Tensor, **options: Any) -> Tensor:  # noqa: ANN401 - torch's
        *_, num_queries, num_slots = arguments
        is_ours = num_queries <= most_queries and (reads_codes or serves(len(seqused_k), heads.num, num_slots))
        return (ours if is_ours else torch_s)(query, *arguments, seqused_k=seqused_k, **options)

    return attend


def serves(num_rows: int, num_heads: int, num_slots: int) -> bool:
    """Whether torch's kernel, unsplit, would be slow for so many rows of a cache of so many slots."""
    return 1 < num_rows < ENOUGH_BLOCKS / num_heads and num_slots >= LONG_SLOTS


@torch.inference_mode()
def fault_of(
    attend: VarlenAttention, *,
    device: torch.device, dtype: torch.dtype, heads: Heads, has_windows: bool = False,
    checked: Sequence[tuple[int, ...]] = CHECKED, kept: KeptRows | None = None,
) -> str | None:  # fmt: skip
    """The first case in which it does not compute what masks give, in words; None if it is right.

    `checked` are the queries of each row, case after case; each case is also tried with a window if there are any.
    Keys and values are kept as `kept` says; None for `dtype`.
    """
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def numbers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    num_pages = -(-max(_CHECKED_LENGTHS) // PAGE_SLOTS)
    most, num_rows = num_pages * PAGE_SLOTS, len(_CHECKED_LENGTHS)
    kept = kept or KeptRows(dtype)
    kept_pools = [kept.pack(some(num_rows * num_pages, PAGE_SLOTS, heads.num_kv, heads.dim)) for _ in range(2)]
    pools = [kept.unpack(pool, dtype) for pool in kept_pools]
    pages_RX = numbers(range(num_rows * num_pages)).flip(0).view(num_rows, -1)
    for queries in checked:
        rows, firsts = len(queries), [*accumulate(queries, initial=0)]
        # So large that a query attends to few slots: the mean of a thousand would hide what is missing.
        queries_QHD = some(firsts[-1], heads.num, heads.dim) * (_SPREAD / (heads.scale * heads.dim**0.5))
        lengths, pages = _CHECKED_LENGTHS[:rows], pages_RX[:rows]
        for window in (None, 4) if has_windows else (None,):
            torch.full_like(queries_QHD, float("nan"))  # what a kernel does not write is then not right by chance
            found_QHD = attend(
                queries_QHD, *kept_pools, numbers(firsts), numbers(range(0, (rows + 1) * most, most)),
                max(queries), most, scale=heads.scale, window_size=window_size(window),
                enable_gqa=heads.num != heads.num_kv, seqused_k=numbers(lengths), block_table=pages,
            )  # fmt: skip
            for row, (length, own) in enumerate(zip(lengths, starmap(slice, pairwise(firsts)), strict=True)):
                keys_SND, values_SND = (pool.index_select(0, pages[row]).flatten(0, 1)[:length] for pool in pools)
                wanted_QHD = _plain(queries_QHD[own], keys_SND, values_SND, heads, window)
                if bool((~((found_QHD[own] - wanted_QHD).abs() <= _TOLERANCE)).any()):  # NaN is wrong, too
                    windowed = f" and a window of {window}" if window else ""
                    return f"wrong values in row {row} where rows have {', '.join(map(str, queries))} queries{windowed}"
    return None


def _plain(queries_QHD: Tensor, keys_SND: Tensor, values_SND: Tensor, heads: Heads, window: int | None) -> Tensor:
    """The attention of one row's queries, the last of which stands at the last slot, in fp32."""
    group, num_slots, num_queries = heads.num // heads.num_kv, len(keys_SND), len(queries_QHD)
    keys_SHD, values_SHD = (part.float().repeat_interleave(group, 1) for part in (keys_SND, values_SND))
    slots_S = torch.arange(num_slots, device=keys_SND.device)
    distance_QS = slots_S[num_slots - num_queries :, None] - slots_S
    is_unseen_QS = (distance_QS < 0) | (distance_QS >= (window or num_slots))
    scores_HQS = torch.einsum("qhd,shd->hqs", queries_QHD.float(), keys_SHD) * heads.scale
    weights_HQS = scores_HQS.masked_fill(is_unseen_QS, float("-inf")).softmax(-1)
    return torch.einsum("hqs,shd->qhd", weights_HQS, values_SHD)


def window_size(window: int | None) -> tuple[int, int]:
    """The keys to the left and to the right that a query sees, -1 for all, if it sees `window` with its own."""
    return (-1 if window is None else window - 1), 0
