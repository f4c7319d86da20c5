"""Attention by lengths in plain operators, as flash attention documents it."""

import torch
from torch import Tensor

from llama_ssp.kernels.parts import Sequences


def varlen_attention(
    queries_QHD: Tensor, keys_SND: Tensor, values_SND: Tensor, sequences: Sequences, *, scale: float, window: int | None
) -> Tensor:
    numbers = sequences[:3]
    assert all(values.dtype == torch.int32 and values.is_contiguous() for values in numbers)
    group = queries_QHD.shape[1] // keys_SND.shape[1]
    first_queries, first_slots, lengths = (values.tolist() for values in numbers)
    assert len(first_queries) == len(first_slots) == len(lengths) + 1
    found_QHD = torch.full_like(queries_QHD, float("nan"))
    for row, used in enumerate(lengths):
        first, last = first_queries[row : row + 2]
        num_queries = last - first
        assert num_queries <= sequences.most_queries
        assert used <= sequences.most_slots
        own = slice(first_slots[row], first_slots[row] + used)
        keys, values = (rows[own].double().repeat_interleave(group, 1) for rows in (keys_SND, values_SND))
        scores = torch.einsum("qhd,khd->hqk", queries_QHD[first:last].double(), keys) * scale
        distance = torch.arange(num_queries)[:, None] + used - num_queries - torch.arange(used)
        is_seen = (distance >= 0) & (distance < (window or used))
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1).nan_to_num(0)
        found_QHD[first:last] = torch.einsum("hqk,khd->qhd", weights, values).to(queries_QHD.dtype)
    return found_QHD


@torch.library.custom_op("tests::varlen", mutates_args=())
def _varlen(parts: list[Tensor], numbers: list[Tensor], most: list[int], scale: float, window: int) -> Tensor:
    queries, keys, values = parts
    sequences = Sequences(numbers[0], numbers[1], numbers[2], most[0], most[1])
    return varlen_attention(queries, keys, values, sequences, scale=scale, window=window or None)


def varlen_operator(
    queries: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, *, scale: float, window: int | None
) -> Tensor:
    """The same as one operator, which a recorder can run again."""
    found: Tensor = _varlen([queries, keys, values], [*sequences[:3]], [*sequences[3:]], scale, window or 0)
    return found
