"""The parts between the products of a layer in Triton; `between` has the references, and chooses.

Shapes: B rows, T positions, M = B * T tokens, E embedding width, U MLP units, X heads, S positions, D head dim,
P = D / 2.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait
from llama_ssp.kernels.parts import Heads, KeptRows, RmsNorm

_HEADS_OF_A_PROGRAM = 8
_UNITS_OF_A_PROGRAM = 1024


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    x, added, ids, weight, normed, width, eps, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """Add `added`, if given, to one row of x in place, and normalize the row; with ids, x becomes rows of `added`."""
    places = tl.arange(0, WIDTH)
    is_place = places < width
    row = tl.program_id(0).to(tl.int64) * width + places
    factors = tl.load(weight + places, mask=is_place, other=0.0).to(tl.float32)
    release(PDL)
    wait(PDL)
    if ids is not None:
        total = tl.load(added + tl.load(ids + tl.program_id(0)) * width + places, mask=is_place, other=0.0)
    else:
        total = tl.load(x + row, mask=is_place, other=0.0)
        if added is not None:
            total += tl.load(added + row, mask=is_place, other=0.0)
    if added is not None:
        tl.store(x + row, total, mask=is_place)
    exact = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(exact * exact, 0) / width + eps)
    tl.store(normed + row, (exact * factor * factors).to(total.dtype), mask=is_place)


def add_norm(
    x_ME: Tensor, added_ME: Tensor | None, weight_E: Tensor, eps: float, *, ids_M: Tensor | None = None
) -> Tensor:
    """Add `added_ME`, if given, to x in place, and return the RMS norm of x.

    With ids, x becomes rows `ids` of `added_ME`, which is an embedding (V, E) then, contiguous.
    """
    num_rows, width = x_ME.shape
    normed_ME = torch.empty_like(x_ME)
    add_norm_kernel[(num_rows,)](
        x_ME,
        added_ME,
        ids_M,
        weight_E,
        normed_ME,
        width,
        eps,
        WIDTH=triton.next_power_of_2(width),
        num_warps=8,
        **chained(x_ME.device),
    )
    return normed_ME


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(gate_up, gated, num_units, UNITS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply some units of one row by the silu of their gates, rounded as torch's two operators do."""
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    is_unit = units < num_units
    row = tl.program_id(0).to(tl.int64) * num_units
    release(PDL)
    wait(PDL)
    gate = tl.load(gate_up + 2 * row + units, mask=is_unit, other=0.0)
    up = tl.load(gate_up + 2 * row + num_units + units, mask=is_unit, other=0.0)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)
    tl.store(gated + row + units, silu * up, mask=is_unit)


def gated(gate_up_M2U: Tensor) -> Tensor:
    """silu(gate) * up of the concatenated gate and up (M, 2 U), contiguous; returns (M, U)."""
    num_rows, num_units = gate_up_M2U.shape[0], gate_up_M2U.shape[1] // 2
    gated_MU = gate_up_M2U.new_empty(num_rows, num_units)
    gated_kernel[(num_rows, triton.cdiv(num_units, _UNITS_OF_A_PROGRAM))](
        gate_up_M2U, gated_MU, num_units, UNITS=_UNITS_OF_A_PROGRAM, num_warps=4, **chained(gate_up_M2U.device)
    )
    return gated_MU


@triton.jit
def _weights_of_heads(query_norm, key_norm, is_query, dims, is_dim):  # type: ignore[no-untyped-def]
    query_weights = tl.load(query_norm + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    key_weights = tl.load(key_norm + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, query_weights, key_weights)


@triton.jit  # type: ignore[untyped-decorator]
def _codes(numbers, IS_FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers in int8, or in E4M3, as bytes; rounded to the nearest, ties to even."""
    if IS_FLOAT:
        size = tl.abs(numbers)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the bias of the exponent is 7, not 127
        small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15  # steps of 2^-9 below 2^-6
        codes = tl.where(size * 64.0 < 1.0, small, normal) | ((numbers < 0.0).to(tl.int32) << 7)
    else:
        codes = (numbers + 12582912.0).to(tl.int32, bitcast=True)  # 1.5 * 2^23: the lowest bits are the whole number
    return (codes & 255).to(tl.uint8)


@triton.jit(do_not_specialize=["num_positions", "num_slots", "all_slots"])  # type: ignore[untyped-decorator]
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    qkv,
    turns,
    positions,
    slots,
    query_norm,
    key_norm,
    parts,
    num_slots,
    all_slots,
    num_positions,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Turn some heads of one token: queries in place, keys into the cache, where values go unturned.

    A kept row has WIDTH numbers. With LARGEST they are codes and a scale; see `parts`.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    num_all = NUM_HEADS + 2 * NUM_KV_HEADS
    release(PDL)
    wait(PDL)
    position = tl.load(positions + token)
    is_here = (heads < num_all)[:, None] & (pairs < HEAD_DIM // 2)[None, :]
    source = qkv + (token * num_all + heads[:, None]) * HEAD_DIM + 2 * pairs[None, :]
    first = tl.load(source, mask=is_here, other=0.0)
    second = tl.load(source + 1, mask=is_here, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    is_pair = pairs < HEAD_DIM // 2
    if query_norm is not None:
        factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        is_query = (heads < NUM_HEADS)[:, None]
        weights = _weights_of_heads(query_norm, key_norm, is_query, 2 * pairs, is_pair)
        other_weights = _weights_of_heads(query_norm, key_norm, is_query, 2 * pairs + 1, is_pair)
        is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        first = tl.where(is_value, first, (first * factor * weights).to(dtype).to(tl.float32))
        second = tl.where(is_value, second, (second * factor * other_weights).to(dtype).to(tl.float32))
    turn = turns + (position * (HEAD_DIM // 2) + pairs) * 2
    cosines = tl.load(turn, mask=is_pair, other=0.0)[None, :]
    sines = tl.load(turn + 1, mask=is_pair, other=0.0)[None, :]
    is_turned = (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    turned = tl.where(is_turned, first * cosines - second * sines, first).to(dtype)
    other_turned = tl.where(is_turned, second * cosines + first * sines, second).to(dtype)
    is_own = is_here & (heads < NUM_HEADS)[:, None]
    tl.store(source, turned, mask=is_own)
    tl.store(source + 1, other_turned, mask=is_own)
    if slots is not None:
        slot = tl.load(slots + token)
    else:
        slot = (token // num_positions) * num_slots + position
    row = parts + ((heads - NUM_HEADS) * all_slots + slot) * WIDTH
    target = row[:, None] + 2 * pairs[None, :]
    is_kept = (heads >= NUM_HEADS) & (heads < num_all)
    is_cached = is_here & is_kept[:, None]
    if LARGEST is not None:
        turned, other_turned = turned.to(tl.float32), other_turned.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(turned), 1), tl.max(tl.abs(other_turned), 1))
        tl.store((row + HEAD_DIM).to(tl.pointer_type(tl.float32)), most / LARGEST, mask=is_kept)
        scale = tl.where(most > 0.0, LARGEST / most, 0.0)[:, None]
        turned, other_turned = _codes(turned * scale, IS_FLOAT), _codes(other_turned * scale, IS_FLOAT)
    tl.store(target, turned, mask=is_cached)
    tl.store(target + 1, other_turned, mask=is_cached)


def rotate_write(
    qkv_MXD: Tensor,
    turns_SP2: Tensor,
    positions_BT: Tensor,
    parts: Tensor,
    *,
    heads: Heads,
    slots_M: Tensor | None = None,
    norms: Sequence[RmsNorm] = (),
    kept: KeptRows | None = None,
) -> None:
    """Norm and turn the query heads of qkv in place, and write turned keys and values to the cache.

    Args:
        qkv_MXD: queries, keys and values of all tokens, contiguous.
        turns_SP2: cosines and sines of each position, fp32.
        positions_BT: positions of the tokens, contiguous.
        parts: the layer's part of the cache; see `LayerBuffer`.
        heads: the heads of the layer.
        slots_M: slots of the tokens, among the slots of all rows; None if row b is row b of the cache.
        norms: norms of query heads and of key heads, in models that have them.
        kept: how keys and values are kept; None for their own dtype.
    """
    num_tokens, num_all, head_dim = qkv_MXD.shape
    batch_size, num_positions = positions_BT.shape
    query_norm, key_norm = [norm.weight_E for norm in norms] or (None, None)
    rotate_write_kernel[(num_tokens, triton.cdiv(num_all, _HEADS_OF_A_PROGRAM))](
        qkv_MXD,
        turns_SP2,
        positions_BT,
        slots_M,
        query_norm,
        key_norm,
        parts,
        parts.shape[1] // batch_size,
        parts.shape[1],
        num_positions,
        norms[0].eps if norms else 0.0,
        NUM_HEADS=heads.num,
        NUM_KV_HEADS=heads.num_kv,
        HEAD_DIM=head_dim,
        HEADS=_HEADS_OF_A_PROGRAM,
        PAIRS=triton.next_power_of_2(head_dim // 2),
        WIDTH=parts.shape[2],
        LARGEST=kept.largest if kept else None,
        IS_FLOAT=kept is not None and kept.dtype.is_floating_point,
        num_warps=4,
        **chained(qkv_MXD.device),
    )
