"""Tries the kernel of attention to latents against torch's operators, with the heads and widths of a model."""

from functools import cache, partial

import torch
from torch import Tensor

from llama_ssp.extensions.gpu.attempts import attempt, check, is_current
from llama_ssp.kernels.latents import LatentAttention, by_torch
from llama_ssp.kernels.parts import KeptRows

_HALVES = (torch.float16, torch.bfloat16)
_CHECKED_SLOTS = 5000
"""Number of slots in a check, enough for parts of both sizes."""


@cache
def find_latents(
    *, device: torch.device, num_heads: int, rank: int, rotary: int, kept: KeptRows, dtype: torch.dtype
) -> LatentAttention | None:
    """Our kernel for models in 16 bits; None, after a warning, if it does not work on this GPU, or for other GPUs."""
    if dtype not in _HALVES or not is_current(device):
        return None
    tried = partial(_tried, device, num_heads, (rank, rotary), kept, dtype)
    return attempt(tried, instead="continuing with torch's operators instead of the kernel of attention to latents")


@torch.inference_mode()
def _tried(
    device: torch.device, num_heads: int, widths: tuple[int, int], kept: KeptRows, dtype: torch.dtype
) -> LatentAttention:
    """Our kernel, once two rows of different lengths get what torch's operators give, for one position and for five."""
    from llama_ssp.extensions.gpu.kernels import latents

    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    parts = [kept.pack(some(2, _CHECKED_SLOTS, width)) for width in widths]
    rows = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    slots_S = torch.arange(_CHECKED_SLOTS, device=device)
    ours = partial(latents.attend, kept=kept)
    for number in (1, 5):
        last_BT = torch.tensor([[_CHECKED_SLOTS - 3], [77]], device=device) - torch.arange(number, 0, -1, device=device)
        mask_B1TS = torch.zeros(2, 1, number, _CHECKED_SLOTS, dtype=dtype, device=device)
        mask_B1TS.masked_fill_((slots_S > last_BT[..., None])[:, None], float("-inf"))
        given = some(2, num_heads, number, sum(widths)), *rows, mask_B1TS, sum(widths) ** -0.5
        check("attention to latents", ours(*given), by_torch(*given, kept=kept))
    return ours
