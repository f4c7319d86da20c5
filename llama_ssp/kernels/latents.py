"""Attention of queries that are taken into the space of latents: the reference, and what operators of devices take.

Shapes: B sequences, H heads, T positions, S slots, R numbers of a latent, P of a rotary key, D = R + P, W width of a
kept part of a row, Q = H * T queries.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llama_ssp.kernels.parts import KeptRows
from llama_ssp.registry import operators

LatentAttention = Callable[..., Tensor]
"""Takes queries (B, H, T, D), kept latents and rotary keys (B, S, W), which are parts of one row and have its strides,
what is added to scores (B, 1, T, S), and what scores are multiplied by; returns sums of latents (B, H, T, R)."""


def by_torch(
    queries_BHTD: Tensor, latents_BSW: Tensor, rotary_BSW: Tensor, mask_B1TS: Tensor, scale: float, *, kept: KeptRows
) -> Tensor:
    """The reference of `LatentAttention`, in the queries' number format."""
    dtype, of_queries = queries_BHTD.dtype, queries_BHTD.shape[1:3]
    latents_BSR, rotary_BSP = (kept.unpack(rows, dtype) for rows in (latents_BSW, rotary_BSW))
    absorbed_BQR, rotated_BQP = queries_BHTD.flatten(1, 2).split([latents_BSR.shape[-1], rotary_BSP.shape[-1]], -1)
    scores_BQS = rotated_BQP @ rotary_BSP.transpose(1, 2)
    scores_BQS.baddbmm_(absorbed_BQR, latents_BSR.transpose(1, 2), beta=scale, alpha=scale)
    scores_BHTS = scores_BQS.unflatten(1, of_queries).add_(mask_B1TS)
    at_least_fp32 = torch.promote_types(dtype, torch.float32)
    weights_BQS = scores_BHTS.softmax(-1, dtype=at_least_fp32).to(dtype).flatten(1, 2)
    attended_BHTR: Tensor = (weights_BQS @ latents_BSR).unflatten(1, of_queries)
    return attended_BHTR


def find_attention(
    device: torch.device, *, num_heads: int, rank: int, rotary: int, kept: KeptRows, dtype: torch.dtype
) -> LatentAttention:
    """The operator of a device for this rank's heads and latents of these widths; elsewhere the reference."""
    sizes = {"num_heads": num_heads, "rank": rank, "rotary": rotary, "kept": kept, "dtype": dtype}
    found: LatentAttention | None = operators.made("latents", device.type, device=device, **sizes)
    return found or partial(by_torch, kept=kept)
