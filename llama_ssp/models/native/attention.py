"""Attention by the operator of `cpu_kernels.attention_operator`, and whether this machine has it.

Shapes: B rows, T positions of a row, M = B * T tokens, H query heads, N key-value heads, X = H + 2 N, S slots of all
rows, D head dim, P = D / 2.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

_LANES, _WIDEST = 16, 256

Attention = Callable[..., Tensor]
"""Turns queries and keys, writes keys and values, and attends to the slots of a token's row up to its own position.

Takes fp32 and int64, contiguous: queries, keys and values (M, X * D), the complex rotary factors of all positions
(S, 1, P), positions (B, T), slots_M among those of all rows, and the cache (2 N, S, D); then H, what scores are
multiplied by, and how many positions a token sees, 0 for all. Returns (M, H * D).
"""

_log = logging.getLogger(__name__)
_library = torch.library.Library("llama_ssp", "FRAGMENT")
for _head_dim in range(_LANES, _WIDEST + 1, _LANES):
    _library.define(
        f"attention_{_head_dim}(Tensor qkv, Tensor turns, Tensor positions, Tensor slots, Tensor(a!) cache, "
        "int num_heads, float scale, int window) -> Tensor"
    )


@cache
def find_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> Attention | None:
    """The operator for such heads, compiled at the first call; None where there is none.

    Without llvmlite, or if it does not work, a warning says so, once; all else is silent.
    """
    if device.type != "cpu" or dtype is not torch.float32 or head_dim % _LANES or head_dim > _WIDEST:
        return None
    try:
        from llama_ssp.cpu_kernels import attention_operator, compiled  # noqa: PLC0415 - imports LLVM

        if not compiled.has_features(attention_operator.FEATURES):
            return None
        name = f"attention_{head_dim}"
        compiled.add_operator(name, partial(attention_operator.emit, head_dim), "attend", shared=("place", "units"))
        attention: Attention = getattr(torch.ops.llama_ssp, name).default
        _check(attention, head_dim)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        _log.warning("continuing without compiled attention, which is slower: %s", reason)
        return None
    return attention


def _check(attention: Attention, head_dim: int) -> None:
    """RuntimeError if two tokens behind twenty others get something else than torch's attention gives them."""
    first, num_slots = 20, 40
    cache_2SD = torch.arange(2.0 * num_slots * head_dim).sin_().view(2, num_slots, head_dim)
    qkv_MXD = torch.arange(2.0 * 4 * head_dim).cos_().view(2, 4, head_dim)
    turns_S1P = torch.polar(torch.ones(num_slots, 1, head_dim // 2), torch.arange(num_slots).float()[:, None, None])
    positions_M = torch.arange(first, first + 2)
    pairs_M3P2 = qkv_MXD[:, :3].unflatten(-1, (-1, 2))
    turned_M3D = torch.view_as_real(torch.view_as_complex(pairs_M3P2) * turns_S1P[positions_M]).flatten(-2)
    wanted_2SD = cache_2SD.clone()
    wanted_2SD[:, positions_M] = torch.stack([turned_M3D[:, 2], qkv_MXD[:, 3]])
    keys_SD, values_SD = wanted_2SD[:, : first + 2]
    is_seen_MS = torch.ones(2, first + 2, dtype=torch.bool).tril_(first)
    wanted_2MD = functional.scaled_dot_product_attention(
        turned_M3D[:, :2].transpose(0, 1), keys_SD, values_SD, attn_mask=is_seen_MS, scale=1.0
    )
    found_ME = attention(qkv_MXD.flatten(1), turns_S1P, positions_M[None], positions_M, cache_2SD, 2, 1.0, 0)
    wanted_ME = wanted_2MD.transpose(0, 1).flatten(1)
    if not (torch.allclose(found_ME, wanted_ME, atol=1e-3) and torch.allclose(cache_2SD, wanted_2SD, atol=1e-3)):
        raise RuntimeError("compiled attention is wrong on this CPU")
