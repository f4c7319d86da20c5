"""Attention to latents in one operator, `code.latents`, which reads them as the cache keeps them.

Torch's operators (`kernels.latents.by_torch`) are the reference.

Shapes: B rows, H heads, T positions, S slots, R numbers of a latent, P of a rotary key, D = R + P, W width of a kept
part of a row.
"""

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.attention import KINDS
from llama_ssp.extensions.cpu.code.kinds import ATTENTION_NEEDS
from llama_ssp.extensions.cpu.operators import Operator, find_operator
from llama_ssp.kernels.latents import LatentAttention, by_torch
from llama_ssp.kernels.parts import KeptRows

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Number formats of models: the operator computes in fp32."""


def find_latents(
    *, rank: int, rotary: int, kept: KeptRows, dtype: torch.dtype, **_others: object
) -> LatentAttention | None:
    """Return the operator for latents of whole vectors in such a cache; None if this CPU cannot use it."""
    if rank % LANES or rotary % LANES or kept.kind not in KINDS or dtype not in _DTYPES:
        return None
    operator = _operator_of(kept, rank, rotary)
    return partial(_attend, operator) if operator else None


@cache
def _operator_of(kept: KeptRows, rank: int, rotary: int) -> Operator | None:
    """The operator, compiled at the first call."""
    return find_operator(
        f"latents_{kept.kind}_{rank}_{rotary}(Tensor queries, Tensor latents, Tensor rotary, Tensor mask, "
        "int row_bytes, int slot_bytes, int num_slots, float scale) -> Tensor",
        "latents",
        kept.kind,
        rank,
        rotary,
        entry="attend_latents",
        needs=ATTENTION_NEEDS,
        check=partial(_check, kept, rank, rotary),
        instead="without compiled attention to latents",
    )


def _attend(  # noqa: PLR0917 - the arguments of a `LatentAttention`
    operator: Operator, queries_BHTD: Tensor, latents_BSW: Tensor, rotary_BSW: Tensor, mask_B1TS: Tensor, scale: float
) -> Tensor:
    """See `LatentAttention`."""
    batch_size, num_heads, num_positions, _ = queries_BHTD.shape
    mask_BTS, num_slots = mask_B1TS[:, 0].float(), latents_BSW.shape[1]
    if missing := -num_slots % LANES:
        mask_BTS = functional.pad(mask_BTS, (0, missing), value=float("-inf"))
    row_bytes, slot_bytes = (latents_BSW.stride(dim) * latents_BSW.itemsize for dim in (0, 1))
    attended_QR = operator(
        queries_BHTD.flatten(1, 2).float(),
        latents_BSW,
        rotary_BSW,
        mask_BTS.contiguous(),
        row_bytes,
        slot_bytes,
        num_slots,
        scale,
    )
    return attended_QR.view(batch_size, num_heads, num_positions, -1).to(queries_BHTD.dtype)


def _check(kept: KeptRows, rank: int, rotary: int, operator: Operator) -> None:
    """Raise RuntimeError if two tokens of two rows do not get the reference's result."""
    queries_BHTD = torch.arange(2.0 * 5 * 2 * (rank + rotary)).sin_().view(2, 5, 2, -1)
    parts = [kept.pack(torch.arange(2.0 * 40 * width).cos_().view(2, 40, width)) for width in (rank, rotary)]
    latents_BSW, rotary_BSW = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    mask_B1TS = torch.full((2, 1, 2, 40), float("-inf"))
    mask_B1TS[0, :, 0, :20] = mask_B1TS[0, :, 1, :21] = mask_B1TS[1, :, :, 30:] = 0
    given = queries_BHTD, latents_BSW, rotary_BSW, mask_B1TS, 0.1
    wanted, found = by_torch(*given, kept=kept), _attend(operator, *given)
    if not torch.allclose(found, wanted, atol=1e-3):
        raise RuntimeError("compiled attention to latents is wrong on this CPU")
