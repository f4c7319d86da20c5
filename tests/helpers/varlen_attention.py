"""Attention by lengths over pages in plain operators, as flash attention documents it, and with torch 2.13's fault."""

import torch
from torch import Tensor


def varlen_attention(  # noqa: PLR0913, PLR0917 - torch's
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """See `torch.nn.attention.varlen.varlen_attn`; the last query stands at the last used key."""
    numbers = (cu_seq_q, cu_seq_k, seqused_k, block_table)
    assert all(values.dtype == torch.int32 and values.is_contiguous() for values in numbers)
    num_heads, num_kv_heads = query.shape[1], key.shape[2]
    assert enable_gqa == (num_heads != num_kv_heads)
    assert cu_seq_k.diff().eq(max_k).all()
    assert len(cu_seq_q) == len(cu_seq_k) == len(block_table) + 1 == len(seqused_k) + 1
    assert block_table.shape[1] * key.shape[1] == max_k
    found = torch.full_like(query, float("nan"))
    for row, (first, last) in enumerate(zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)):
        num_queries, used = last - first, int(seqused_k[row])
        assert num_queries <= max_q
        keys, values = (pool[block_table[row].long()].flatten(0, 1)[:used].double() for pool in (key, value))
        keys, values = (part.repeat_interleave(num_heads // num_kv_heads, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), keys) * scale
        place = torch.arange(used) - (torch.arange(num_queries)[:, None] + used - num_queries)
        left, right = window_size
        is_seen = ((left < 0) | (place >= -left)) & ((right < 0) | (place <= right))
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1).nan_to_num(0)
        found[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return found


def varlen_attn_out(  # noqa: PLR0913, PLR0917 - torch's
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    num_splits: int | None = None,
) -> None:  # fmt: skip
    """That of torch 2.13, which writes the first sequence only where it splits (issue 194167 of pytorch)."""
    found = varlen_attention(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size,
        enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
    )  # fmt: skip
    written = len(out) if num_splits == 1 else int(cu_seq_q[1])
    out[:written] = found[:written]
