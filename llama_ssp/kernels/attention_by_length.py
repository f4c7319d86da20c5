"""Attention by lengths of rows: each row up to its own last position, which is on the device.

A mask excludes flash attention, and other kernels walk all slots of a row with one thread block for each key-value
head: few blocks for a GPU with a hundred and more multiprocessors. These kernels read no slot beyond a row's length:

    the queries of a round     ours (`operators`), which splits a row over many thread blocks; else torch's
    prompts                    torch's flash attention

On an H200 torch's took 68 us for 5 queries over 2048 slots of 32 heads of 128 dimensions, ours 17; for a few slots 6
and 5. Keys and values that are kept in another format than queries are ours to read too; torch's kernel gets a copy of
all slots in the queries' format (`unpacking`).

It runs where `architectures.engine.reads_by_length` says so, which plans ask too; elsewhere masks are used (see
`models.llama.attention`). Before its first use each kernel is held to a masked attention on this very device, with the
model's own heads.

Shapes: Q queries of all sequences, H query heads, N key-value heads, D head dim, S slots of all rows, C sequences.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.engine import reads_by_length
from llama_ssp.kernels.parts import Heads, KeptRows, Sequences, left_of
from llama_ssp.ranks.gpu import ends_run

_log = logging.getLogger(__name__)

_TOLERANCE = 0.05
"""Tolerance for values of about 1: 16 bits round to 0.004, and a wrong key changes more than this."""
CHECKED = ((1,), (5,), (1, 1, 1), (5, 5, 5), (4, 1, 70))
"""Queries of each row, as forwards have them: steps and rounds of one row and of three, and packed prompts."""
_SPREAD = 6.0
"""Standard deviation of the scores."""
_CHECKED_LENGTHS = 1000, 300, 77


VarlenAttention = Callable[..., Tensor]
"""Maps queries (Q, H, D), keys and values (S, N, D) and `Sequences` to (Q, H, D); `scale` and `window` are keywords.

The last query of a sequence sees all of its slots, or the last `window` of them if that is not None.
"""


@cache
def find_varlen(
    device: torch.device, dtype: torch.dtype, heads: Heads, *, rounds_inputs: bool = False, has_windows: bool = False
) -> VarlenAttention | None:
    """Torch's kernel for such heads on a device; None if it does not run there or fails the check."""
    if not reads_by_length(
        capability=capability_of(device), value_bytes=dtype.itemsize, head_dim=heads.dim, rounds_inputs=rounds_inputs
    ):
        return None
    try:
        problem = fault_of(flash_attention, device=device, dtype=dtype, heads=heads, has_windows=has_windows)
    except (RuntimeError, TypeError, AttributeError) as error:
        if ends_run(error):
            raise
        problem = str(error).strip().partition("\n")[0]
    if problem is None:
        return flash_attention
    _log.warning("continuing with masks, because attention by lengths does not work on %s: %s", device, problem)
    return None


def capability_of(device: torch.device) -> float:
    """The compute capability of an NVIDIA GPU, such as 8.6; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip:
        return 0.0
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def flash_attention(
    queries_QHD: Tensor, keys_SND: Tensor, values_SND: Tensor, sequences: Sequences, *, scale: float, window: int | None
) -> Tensor:
    """Torch's flash attention, a `VarlenAttention`.

    torch 2.11 to 2.13 have this operator in common; the public function in `torch.nn.attention.varlen` knows no lengths
    in 2.11.
    """
    attended_QHD: Tensor = torch.ops.aten._flash_attention_forward(
        queries_QHD,
        keys_SND,
        values_SND,
        sequences.first_query_C1,
        sequences.first_slot_C1,
        sequences.most_queries,
        sequences.most_slots,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=left_of(window),
        window_size_right=0,
        seqused_k=sequences.used_C,
    )[0]
    return attended_QHD


def unpacking(attend: VarlenAttention, kept: KeptRows) -> VarlenAttention:
    """Attention over rows that are kept so: all of them are unpacked."""

    def unpacked(queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, **how: Any) -> Tensor:
        numbers = (kept.unpack(rows, queries.dtype) for rows in (keys, values))
        return attend(queries, *numbers, sequences, **how)

    return unpacked


@torch.inference_mode()
def fault_of(
    attend: VarlenAttention,
    *,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    has_windows: bool = False,
    checked: Sequence[tuple[int, ...]] = CHECKED,
    kept: KeptRows | None = None,
) -> str | None:
    """The first case in which its results are not as with masks, in words; None if it is right.

    `checked` are the queries of each row, case after case; each case is also tried with a window if there are any.
    Keys and values are kept as `kept` says; None for `dtype`.
    """
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def numbers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    most, num_rows = max(_CHECKED_LENGTHS), len(_CHECKED_LENGTHS)
    kept = kept or KeptRows(dtype)
    kept_pools = [kept.pack(some(num_rows * most, heads.num_kv, heads.dim)) for _ in range(2)]
    pools = [kept.unpack(pool, dtype) for pool in kept_pools]
    for queries in checked:
        rows, first_queries = len(queries), [*accumulate(queries, initial=0)]
        # So large that a query attends to few slots: the mean of a thousand would hide what is missing.
        queries_QHD = some(first_queries[-1], heads.num, heads.dim) * (_SPREAD / (heads.scale * heads.dim**0.5))
        lengths, first_slots = _CHECKED_LENGTHS[:rows], [row * most for row in reversed(range(num_rows))]
        sequences = Sequences(
            numbers(first_queries), numbers([*first_slots[:rows], 0]), numbers(lengths), max(queries), most
        )
        for window in (None, 4) if has_windows else (None,):
            torch.full_like(queries_QHD, float("nan"))  # what a kernel does not write is then not right by chance
            found_QHD = attend(queries_QHD, *kept_pools, sequences, scale=heads.scale, window=window)
            own_queries = starmap(slice, pairwise(first_queries))
            for row, (length, first, own) in enumerate(zip(lengths, first_slots, own_queries, strict=False)):
                keys_SND, values_SND = (pool[first : first + length] for pool in pools)
                wanted_QHD = _plain(queries_QHD[own], keys_SND, values_SND, heads.scale, window)
                if bool((~((found_QHD[own] - wanted_QHD).abs() <= _TOLERANCE)).any()):  # NaN is wrong, too
                    windowed = f" and a window of {window}" if window else ""
                    return f"wrong values in row {row} where rows have {', '.join(map(str, queries))} queries{windowed}"
    return None


def _plain(queries_QHD: Tensor, keys_SND: Tensor, values_SND: Tensor, scale: float, window: int | None) -> Tensor:
    """The attention of one row's queries, the last of which stands at the last slot, in fp32."""
    slots_S = torch.arange(len(keys_SND), device=keys_SND.device)
    distance_QS = slots_S[-len(queries_QHD) :, None] - slots_S
    is_seen_QS = (distance_QS >= 0) & (distance_QS < (window or len(keys_SND)))
    queries, keys, values = (part.float().transpose(0, 1) for part in (queries_QHD, keys_SND, values_SND))
    attended_HQD = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=is_seen_QS, scale=scale, enable_gqa=True
    )
    return attended_HQD.transpose(0, 1)
