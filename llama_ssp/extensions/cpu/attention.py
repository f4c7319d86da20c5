"""Attention of a layer with the other steps between its two products: the rotary turn and the write to the cache.

`by_torch` is the reference; in fp32, for heads of whole vectors, `code.attention` computes it in one operator.

Shapes: B rows, T positions of a row, M = B * T tokens, H query heads, N key-value heads, X = H + 2 N, S slots of all
rows, D head dim, P = D / 2, W width of a cache's row.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.code.kinds import ATTENTION_NEEDS, WIDEST_HEAD
from llama_ssp.extensions.cpu.operators import find_operator
from llama_ssp.kernels.parts import SINGLES, KeptRows
from llama_ssp.models.runner import nearest

KINDS = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
"""Kinds of rows that the operator reads."""

Attention = Callable[..., Tensor]
"""Turns queries and keys, writes keys and values, and attends to the slots of a token's row up to its own position.

Takes contiguous tensors in fp32 and int64: queries, keys and values (M, X * D); the complex rotary factors of all
positions (S, 1, P); positions (B, T); slots_M among the slots of all rows; the cache (2 N, S, W); the last slot (B, T)
of its row that each token sees, which for a row's first token is its own; and `sees` (B, T, A), which of the A slots up
to the last token's each token sees, or `ALL`. Then takes H, the factor of scores, and how many positions a token sees,
0 for all; `sees` does not take that into account. Returns (M, H * D).
"""
ALL = torch.empty(0, 0, 0, dtype=torch.bool)
"""The value of `sees` without trees: each token sees all slots up to its own."""


class TokenPlaces(NamedTuple):
    """Positions and slots of the tokens of a forward; see `Attention`."""

    turns_S1P: Tensor
    positions_BT: Tensor
    slots_M: Tensor
    cache_2NSW: Tensor
    own_slots_BT: Tensor
    sees_BTA: Tensor


def by_torch(  # noqa: PLR0913, PLR0917 - the arguments of an operator
    qkv: Tensor,
    turns_S1P: Tensor,
    positions_BT: Tensor,
    slots_M: Tensor,
    cache_2NSW: Tensor,
    own_slots_BT: Tensor,
    sees_BTA: Tensor,
    num_heads: int,
    scale: float,
    window: int,
    rows: KeptRows | None = None,
) -> Tensor:
    """Compute the reference of `Attention`, in any number format: writes the cache, then attends row by row."""
    num_kv, rows = cache_2NSW.shape[0] // 2, rows or KeptRows(qkv.dtype)
    qkv_MXD = qkv.view(len(slots_M), num_heads + 2 * num_kv, -1)
    pairs = torch.view_as_complex(qkv_MXD[:, : num_heads + num_kv].unflatten(-1, (-1, 2)).contiguous())
    turned_MXD = torch.view_as_real(pairs * turns_S1P[positions_BT.flatten()]).flatten(-2)
    written_MXD = torch.cat([turned_MXD[:, num_heads:], qkv_MXD[:, num_heads + num_kv :]], 1)
    cache_2NSW[:, slots_M] = rows.pack(written_MXD).transpose(0, 1)
    queries_BTHD = turned_MXD[:, :num_heads].unflatten(0, positions_BT.shape)
    found = []
    for row, (own_T, slots_T) in enumerate(zip(own_slots_BT, slots_M.view_as(own_slots_BT), strict=True)):
        start, num_slots = int(slots_T[0] - own_T[0]), int(own_T[-1]) + 1
        slots_S = torch.arange(num_slots)
        is_seen_TS = slots_S <= own_T[:, None]
        if window:
            is_seen_TS &= slots_S > positions_BT[row, :, None] - window
        if num_behind := sees_BTA.shape[2]:
            is_seen_TS[:, -num_behind:] &= nearest(sees_BTA[row], window or None)
        keys_NSD, values_NSD = rows.unpack(cache_2NSW[:, start : start + num_slots], qkv.dtype).split(num_kv)
        attended_HTD = functional.scaled_dot_product_attention(
            queries_BTHD[row].transpose(0, 1), keys_NSD, values_NSD, attn_mask=is_seen_TS, scale=scale, enable_gqa=True
        )
        found.append(attended_HTD.transpose(0, 1).flatten(1))
    return torch.cat(found)


SIGNATURE = (
    "Tensor qkv, Tensor turns, Tensor positions, Tensor slots, Tensor(a!) cache, Tensor own_slots, Tensor sees, "
    "int num_heads, float scale, int window) -> Tensor"
)
"""The arguments and the result of the operator, after its name and a parenthesis."""


@cache
def find_attention(head_dim: int, rows: KeptRows = SINGLES) -> Attention | None:
    """Return the operator for such heads and cache rows, compiled at the first call; None if this CPU cannot use it."""
    if head_dim % LANES or head_dim > WIDEST_HEAD or rows.kind not in KINDS:
        return None
    return find_operator(
        f"attention_{rows.kind}_{head_dim}({SIGNATURE}",
        "attention",
        rows.kind,
        head_dim,
        entry="attend",
        shared=("place", "units"),
        needs=ATTENTION_NEEDS,
        check=partial(_check, rows, head_dim),
        instead="without compiled attention",
    )


def _check(rows: KeptRows, head_dim: int, attention: Attention) -> None:
    """Raise RuntimeError if two tokens after twenty others do not get the reference's result."""
    num_slots, positions_BT = 40, torch.tensor([[20, 21]])
    cache_2SW = rows.pack(torch.arange(2.0 * num_slots * head_dim).sin_().view(2, num_slots, head_dim))
    qkv_ME = torch.arange(2.0 * 4 * head_dim).cos_().view(2, -1)
    turns_S1P = torch.polar(torch.ones(num_slots, 1, head_dim // 2), torch.arange(num_slots).float()[:, None, None])
    wanted_2SW = cache_2SW.clone()
    given = positions_BT, ALL, 2, 1.0, 0
    wanted_ME = by_torch(qkv_ME, turns_S1P, positions_BT, positions_BT[0], wanted_2SW, *given, rows)
    found_ME = attention(qkv_ME, turns_S1P, positions_BT, positions_BT[0], cache_2SW, *given)
    found_2SD, wanted_2SD = (rows.unpack(cache, torch.float32) for cache in (cache_2SW, wanted_2SW))
    # A number next to a step's middle may differ by a step.
    atol = 1e-3 if rows == SINGLES else 0.1
    if not (torch.allclose(found_ME, wanted_ME, atol=atol) and torch.allclose(found_2SD, wanted_2SD, atol=atol)):
        raise RuntimeError("compiled attention is wrong on this CPU")
