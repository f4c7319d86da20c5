"""Attention that computes the positions of a round one by one, bit-identical to single steps.

A kernel adds in another order for another number of queries. If inputs are quantized afterwards, the last bit can move
them to another quantization step, and a round of K + 1 positions would differ from K + 1 single steps. So each position
is computed in the shape of a single step. Prefill, which is longer, is not split: all modes compute it the same way.

Shapes: B sequences, T positions, N key-value heads, G query heads of each, Q = T * G queries, S slots, D head dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FEW_POSITIONS = 32


def attend_by_position(
    attend: Callable[[Tensor, Tensor], Tensor], queries_BNQD: Tensor, mask_B1QS: Tensor, *, group: int = 1
) -> Tensor:
    """Call `attend` once for each position, with the queries of that position and their mask.

    It maps queries (B, N, Q, D), and what is added to their scores, to outputs of the same shape. The queries are
    sorted by position; `group` is G.
    """
    if queries_BNQD.shape[2] > FEW_POSITIONS * group:
        return attend(queries_BNQD, mask_B1QS)
    pieces = zip(queries_BNQD.split(group, 2), mask_B1QS.split(group, 2), strict=True)
    return torch.cat([attend(queries_BNGD, mask_B1GS) for queries_BNGD, mask_B1GS in pieces], 2)
