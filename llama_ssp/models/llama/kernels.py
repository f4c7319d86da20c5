"""Triton kernels of the lean decoder, each as large as it can be.

    product        x W^T, with whatever stands before and after it: the sum of the ranks added to the residual, the RMS
                   norm, the bias, the gate of the MLP, the residual
    rotate_write   the norms of heads, the rotary embedding, and the write to the cache
    add_norm       the residual and the norm
    gated          silu(gate) * up

For few rows a product reads its weights and hardly computes, so what surrounds it is free, where a kernel of its own
costs a launch and a trip through memory. Each program computes some outputs of all rows and reads each of its weights
once.

This module imports Triton; CPU builds of torch come without.

Shapes: B sequences, T positions, M = B * T rows, I inputs, O outputs, E embedding width, X heads, S positions, D head
dim, P = D / 2 pairs of dimensions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST_ROWS = 16
"""What one instruction multiplies; fewer rows are padded."""
_HEADS_OF_A_PROGRAM = 8
_UNITS_OF_A_PROGRAM = 1024


class Tile(NamedTuple):
    """How a product is cut: outputs of a program, inputs of a step, and steps in flight."""

    outputs: int = 32
    inputs: int = 128
    num_stages: int = 5


TILE = Tile()


class NormWeight(NamedTuple):
    """The weight (I,) of an RMS norm, multiplied by `scale` so that no product with it overflows, and its epsilon."""

    weight_I: Tensor
    scale: float
    eps: float


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x, added, summed, norm, weight, bias, residual, y,
    num_rows, num_outputs, num_inputs, eps, unscale,
    HAS_ADDED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile (ROWS, OUTPUTS) of y; the first program also stores x + added to `summed`.

    With GATES the weight has 2 O rows, gate and up, and y is silu(gate) * up.
    """
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    # Gate and up take turns, so that one product computes both.
    NUM: tl.constexpr = 2 if GATES else 1
    columns = tl.program_id(0) * OUTPUTS * NUM + tl.arange(0, OUTPUTS * NUM)
    is_column = columns // NUM < num_outputs
    weight_rows = (columns % NUM) * num_outputs + columns // NUM
    places = rows[:, None].to(tl.int64) * num_inputs
    begins = weight_rows[:, None].to(tl.int64) * num_inputs
    total = tl.zeros((ROWS, OUTPUTS * NUM), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        is_here = is_row[:, None] & is_input[None, :]
        weights = tl.load(weight + begins + inputs[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0)
        x_tile = tl.load(x + places + inputs[None, :], mask=is_here, other=0.0)
        if HAS_ADDED:
            x_tile += tl.load(added + places + inputs[None, :], mask=is_here, other=0.0)
            tl.store(summed + places + inputs[None, :], x_tile, mask=is_here & (tl.program_id(0) == 0))
        if HAS_NORM:
            exact = x_tile.to(tl.float32)
            squares += tl.sum(exact * exact, 1)
            factors = tl.load(norm + inputs, mask=is_input, other=0.0).to(tl.float32)
            x_tile = (exact * factors[None, :]).to(x_tile.dtype)
        total = tl.dot(x_tile, tl.trans(weights), total)
    if HAS_NORM:
        total *= (tl.rsqrt(squares / num_inputs + eps) * unscale)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + weight_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if GATES:
        gate, up = tl.split(tl.reshape(total, (ROWS, OUTPUTS, 2)))
        # Rounded as the separate product would be.
        gate = gate.to(y.dtype.element_ty).to(tl.float32)
        total = gate / (1.0 + tl.exp(-gate)) * up.to(y.dtype.element_ty).to(tl.float32)
    here = rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    is_here_too = is_row[:, None] & is_output[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + here, mask=is_here_too, other=0.0).to(tl.float32)
    tl.store(y + here, total.to(y.dtype.element_ty), mask=is_here_too)


def padded(num_rows: int) -> int:
    """The rows of the tile that holds so many."""
    return max(int(triton.next_power_of_2(num_rows)), _LEAST_ROWS)


def product(
    x_MI: Tensor,
    weight_OI: Tensor,
    *,
    norm: NormWeight | None = None,
    added_MI: Tensor | None = None,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    gates: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute norm(x + added) W^T + bias + residual for few rows; all tensors are contiguous.

    With `gates` the weight is that of gate and up, one after the other, and the result silu(gate) * up. The residual is
    overwritten by the result. `dtype` is that of the result, by default that of x.

    Returns x + added, which is x if nothing is added, and the result.
    """
    num_rows, num_inputs = x_MI.shape
    num_outputs = weight_OI.shape[0] // 2 if gates else weight_OI.shape[0]
    summed_MI = x_MI if added_MI is None else torch.empty_like(x_MI)
    y_MO = residual_MO
    if y_MO is None:
        y_MO = x_MI.new_empty(num_rows, num_outputs, dtype=dtype)
    product_kernel[(triton.cdiv(num_outputs, TILE.outputs),)](
        x_MI, added_MI, summed_MI, norm and norm.weight_I, weight_OI, bias_O, residual_MO, y_MO,
        num_rows, num_outputs, num_inputs, norm.eps if norm else 0.0, 1 / norm.scale if norm else 1.0,
        HAS_ADDED=added_MI is not None, HAS_NORM=norm is not None, HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_MO is not None, GATES=gates, ROWS=padded(num_rows),
        OUTPUTS=TILE.outputs, INPUTS=TILE.inputs, num_warps=4, num_stages=TILE.num_stages,
    )  # fmt: skip
    return summed_MI, y_MO


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(x, added, weight, normed, width, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to one row of x, in place, and normalize the sum."""
    places = tl.arange(0, WIDTH)
    is_place = places < width
    row = tl.program_id(0).to(tl.int64) * width + places
    total = tl.load(x + row, mask=is_place, other=0.0) + tl.load(added + row, mask=is_place, other=0.0)
    tl.store(x + row, total, mask=is_place)
    exact = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(exact * exact, 0) / width + eps)
    factors = tl.load(weight + places, mask=is_place, other=0.0).to(tl.float32)
    tl.store(normed + row, (exact * factor * factors).to(total.dtype), mask=is_place)


def add_norm(x_ME: Tensor, added_ME: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Add to x in place, and return the RMS norm of the sum."""
    num_rows, width = x_ME.shape
    normed_ME = torch.empty_like(x_ME)
    add_norm_kernel[(num_rows,)](
        x_ME, added_ME, weight_E, normed_ME, width, eps, WIDTH=triton.next_power_of_2(width), num_warps=8
    )
    return normed_ME


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(gate_up, gated, num_units, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply some units of one row by the silu of their gates, rounded as torch's two operators do."""
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    is_unit = units < num_units
    row = tl.program_id(0).to(tl.int64) * num_units
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
        gate_up_M2U, gated_MU, num_units, UNITS=_UNITS_OF_A_PROGRAM, num_warps=4
    )
    return gated_MU


@triton.jit(do_not_specialize=["num_positions", "num_slots", "all_slots"])  # type: ignore[untyped-decorator]
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    qkv, turns, positions, slots, query_norm, key_norm, parts,
    num_slots, all_slots, num_positions, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_NORMS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Turn some heads of one token: queries in place, keys into the cache; values go there as they are."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    num_all = NUM_HEADS + 2 * NUM_KV_HEADS
    position = tl.load(positions + token)
    is_here = (heads < num_all)[:, None] & (pairs < HEAD_DIM // 2)[None, :]
    source = qkv + (token * num_all + heads[:, None]) * HEAD_DIM + 2 * pairs[None, :]
    first = tl.load(source, mask=is_here, other=0.0)
    second = tl.load(source + 1, mask=is_here, other=0.0)
    dtype = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    is_pair = pairs < HEAD_DIM // 2
    if HAS_NORMS:
        factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        is_query = (heads < NUM_HEADS)[:, None]
        weights = tl.where(
            is_query,
            tl.load(query_norm + 2 * pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :],
            tl.load(key_norm + 2 * pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :],
        )
        other_weights = tl.where(
            is_query,
            tl.load(query_norm + 2 * pairs + 1, mask=is_pair, other=0.0).to(tl.float32)[None, :],
            tl.load(key_norm + 2 * pairs + 1, mask=is_pair, other=0.0).to(tl.float32)[None, :],
        )
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
    if HAS_SLOTS:
        slot = tl.load(slots + token)
    else:
        slot = (token // num_positions) * num_slots + position
    target = parts + ((heads - NUM_HEADS)[:, None] * all_slots + slot) * HEAD_DIM + 2 * pairs[None, :]
    is_cached = is_here & (heads >= NUM_HEADS)[:, None]
    tl.store(target, turned, mask=is_cached)
    tl.store(target + 1, other_turned, mask=is_cached)


def rotate_write(
    qkv_MXD: Tensor,
    turns_SP2: Tensor,
    positions_BT: Tensor,
    parts: Tensor,
    *,
    num_heads: int,
    slots_M: Tensor | None = None,
    norms: Sequence[Tensor] = (),
    eps: float = 0.0,
) -> None:
    """Norm and turn the query heads of qkv in place, and write turned keys and values to the cache.

    Args:
        qkv_MXD: queries, keys and values of all tokens, contiguous.
        turns_SP2: cosines and sines of each position, fp32.
        positions_BT: of the tokens, contiguous.
        parts: the layer's part of the cache; see `LayerBuffer`.
        num_heads: query heads.
        slots_M: of the tokens, among the slots of all rows; None if row b is row b of the cache.
        norms: the weights (D,) of the norms of query heads and of key heads, in models that have them.
        eps: of the norms.
    """
    num_tokens, num_all, head_dim = qkv_MXD.shape
    batch_size, num_positions = positions_BT.shape
    query_norm, key_norm = norms or (None, None)
    rotate_write_kernel[(num_tokens, triton.cdiv(num_all, _HEADS_OF_A_PROGRAM))](
        qkv_MXD, turns_SP2, positions_BT, slots_M, query_norm, key_norm, parts,
        parts.shape[1] // batch_size, parts.shape[1], num_positions, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=(num_all - num_heads) // 2, HEAD_DIM=head_dim,
        HAS_SLOTS=slots_M is not None, HAS_NORMS=bool(norms), HEADS=_HEADS_OF_A_PROGRAM,
        PAIRS=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip
