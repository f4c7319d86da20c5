"""Tries our attention by lengths of rows, for the queries of rounds.

Shapes: Q queries of all sequences, H query heads, N key-value heads, D head dim, S slots of all rows.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama_ssp.extensions.gpu.attempts import attempt
from llama_ssp.kernels.attention_by_length import CHECKED, VarlenAttention, fault_of
from llama_ssp.kernels.parts import Heads, KeptRows, Sequences


def find_ours(torch_s: VarlenAttention, heads: Heads, **how: Any) -> VarlenAttention | None:
    """Return our kernel for the queries of rounds, with torch's for more queries; None if ours fails on this GPU."""
    both = partial(_with_ours, torch_s, heads, **how)
    return attempt(both, instead="continuing with torch's attention in rounds too")


def _with_ours(
    torch_s: VarlenAttention,
    heads: Heads,
    *,
    device: torch.device,
    dtype: torch.dtype,
    has_windows: bool,
    kept: KeptRows,
) -> VarlenAttention:
    """Return our kernel for queries of rounds, with torch's for more; RuntimeError if ours is wrong for such heads."""
    from llama_ssp.extensions.gpu.kernels import attention

    most_queries = attention.MOST_ROWS * heads.num_kv // heads.num
    # Steps, rounds, and ragged queries up to the largest tile.
    checked = [queries for queries in (*CHECKED, (most_queries, 1)) if max(queries) <= most_queries]
    ours = partial(attention.attend, kept=kept)
    if fault := fault_of(
        ours, device=device, dtype=dtype, heads=heads, has_windows=has_windows, checked=checked, kept=kept
    ):
        raise RuntimeError(f"the kernel of split attention gives {fault}")

    def attend(queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, **how: Any) -> Tensor:
        kernel = ours if sequences.most_queries <= most_queries else torch_s
        return kernel(queries, keys, values, sequences, **how)

    return attend
