"""Attention that gives every position of a round what it would get alone, to the last bit.

A kernel adds up in another order when it has other numbers of queries. Where inputs are quantized afterwards, that last
bit can decide between two steps, and K + 1 positions would no longer be K + 1 single ones. So they are attended to one
after the other, in the shape that a single one has. Prefill, which is longer, is not cut: it is the same for everyone.

Shapes: B sequences, T positions, N key-value heads, G query heads of each, Q = T * G queries, S slots, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FEW_POSITIONS = 32
BY_POSITION = "sdpa_by_position"
"""Name of this attention among the library's."""


def attend_by_position(
    attend: Callable[[Tensor, Tensor], Tensor], queries_BNQD: Tensor, mask_B1QS: Tensor, *, group: int = 1
) -> Tensor:
    """Call `attend` with the queries and the mask of one position after the other.

    Args:
        attend: maps queries (B, N, Q, D) and their mask to what they attend to, alike in shape.
        queries_BNQD: sorted by position.
        mask_B1QS: what to add to their scores.
        group: G, the queries of one position.
    """
    if queries_BNQD.shape[2] > FEW_POSITIONS * group:
        return attend(queries_BNQD, mask_B1QS)
    pieces = zip(queries_BNQD.split(group, 2), mask_B1QS.split(group, 2), strict=True)
    return torch.cat([attend(queries_BNGD, mask_B1GS) for queries_BNGD, mask_B1GS in pieces], 2)


def _of_library(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **options: Any,  # noqa: ANN401 - the library's
) -> tuple[Tensor, None]:
    """The library's attention, position by position; it returns (B, T, H, D)."""

    def attend(queries: Tensor, mask: Tensor) -> Tensor:
        return sdpa_attention_forward(module, queries, key, value, mask, **options)[0].transpose(1, 2)

    return attend_by_position(attend, query, attention_mask).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_POSITION, _of_library)
AttentionMaskInterface.register(BY_POSITION, sdpa_mask)
