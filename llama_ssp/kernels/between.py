"""The parts between the products of a Llama-like layer: norms, rotary embedding, write to the cache, gate.

    part           reference, for every device    what a device may have instead, as `OwnKernels`
    rotate_write   `rotate_write`                 one kernel, norms of heads included
    add_norm       `RmsNorm`, often of a sum      one kernel, the first layer's embedding included
    gated          `gated`                        one kernel

Shapes: B rows, T positions, M = B * T tokens, E width of what is normalized, U MLP units, X = H + 2 N heads, H query
heads, N key-value heads, S positions, D head dim, P = D / 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm


def norm_heads(qkv_MXD: Tensor, norms: Sequence[RmsNorm], heads: Heads) -> None:
    """Norm queries and keys in place."""
    turned_MXD = qkv_MXD.narrow(1, 0, heads.num + heads.num_kv)
    for norm, part in zip(norms, turned_MXD.split([heads.num, heads.num_kv], 1), strict=True):
        part.copy_(norm(part))


def rotate_write(
    qkv_MXD: Tensor,
    freqs_cis_M1P: Tensor,
    slots_M: Tensor,
    parts: Tensor,
    *,
    heads: Heads,
    norms: Sequence[RmsNorm],
    kept: KeptRows | None = None,
) -> None:
    """Norm and turn queries and keys in place, in fp32, and write keys and values to the cache.

    Args:
        qkv_MXD: queries, keys and values.
        freqs_cis_M1P: each token's complex rotary factors, for adjacent pairs of dimensions.
        slots_M: of the tokens, among the slots of all rows.
        parts: the layer's part of the cache; see `LayerBuffer`.
        heads: of the layer.
        norms: of query heads and of key heads, in models that have them.
        kept: how keys and values are kept; None for their own dtype.
    """
    if norms:
        norm_heads(qkv_MXD, norms, heads)
    turned_MXD = qkv_MXD.narrow(1, 0, heads.num + heads.num_kv)
    in_fp32 = turned_MXD.float()
    torch.view_as_complex(in_fp32.unflatten(-1, (-1, 2))).mul_(freqs_cis_M1P)
    if in_fp32 is not turned_MXD:
        turned_MXD.copy_(in_fp32)
    written_M2ND = qkv_MXD.narrow(1, heads.num, 2 * heads.num_kv)
    kept_M2NW = kept.pack(written_M2ND) if kept else written_M2ND
    parts.index_copy_(1, slots_M, kept_M2NW.transpose(0, 1))


def gated(gate_up_M2U: Tensor) -> Tensor:
    """silu(gate) * up of the concatenated gate and up (M, 2 U); returns (M, U)."""
    gate_MU, up_MU = gate_up_M2U.chunk(2, dim=-1)
    return functional.silu(gate_MU).mul_(up_MU)


@dataclass
class OwnKernels:
    """Operators of a device between products; None where the reference runs instead."""

    rotate_write: Callable[..., None] | None = None
    add_norm: Callable[..., Tensor] | None = None
    gated: Callable[[Tensor], Tensor] | None = None
