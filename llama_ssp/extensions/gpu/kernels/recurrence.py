"""A few tokens of a recurrent layer in Triton, convolution and states included; `recurrence` has the references.

The gated delta rule and Mamba 2: convolution, norms of heads, decays. Each program has some values of one head of one
row, so that no row depends on others. It reads the state and the inputs before its first token from the rings of
`models.states`, and writes the states after each token there. Tokens that do not count are not written; their outputs
are finite, and are not read.

Shapes: B sequences, T tokens, X numbers of a projected token, C channels, W width of the convolution, H heads, N width
of a key, P width of a value, D decays of a head (1 or N), R kept states, I kept inputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.kernels.recurrence import HeadLayout, Places

_NUMBERS_OF_A_PROGRAM, _WARPS = 4096, 4


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small  # the quotient takes its rounding out of the logarithm
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))


@triton.jit
def _input(x, inputs, ring, at, channels, is_channel, first, token, place, x_step, num_inputs, num_channels):  # type: ignore[no-untyped-def]
    """The inputs of some channels at a place of this forward, or before it: from the ring, zeros before the text."""
    own = tl.load(x + (token + place) * x_step + at, mask=is_channel & (place >= 0), other=0.0)
    slot = ring + (first + place + num_inputs) % num_inputs
    is_kept = is_channel & (place < 0) & (first + place >= 0)
    return own + tl.load(inputs + slot * num_channels + channels, mask=is_kept, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    x,
    inputs,
    weight,
    bias,
    ring,
    at,
    channels,
    is_channel,
    first,
    token,
    place,
    taken,
    is_writer,
    x_step,
    num_inputs,
    num_channels,
    WIDTH: tl.constexpr,
):
    """The convolution of some channels at one place, rounded; keeps its newest input if the token counts."""
    total = tl.zeros(at.shape, tl.float32)
    for tap in tl.static_range(WIDTH):
        number = _input(
            x,
            inputs,
            ring,
            at,
            channels,
            is_channel,
            first,
            token,
            place - (WIDTH - 1) + tap,
            x_step,
            num_inputs,
            num_channels,
        )
        factor = tl.load(weight + channels * WIDTH + tap, mask=is_channel, other=0.0)
        total += number.to(tl.float32) * factor.to(tl.float32)
        if tap == WIDTH - 1:
            slot = ring + (first + place) % num_inputs
            tl.store(inputs + slot * num_channels + channels, number, mask=is_channel & is_writer & (place < taken))
    if bias is not None:
        total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)
    return total.to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit
def _silu(x, inputs):  # type: ignore[no-untyped-def]
    return (x / (1.0 + tl.exp(-x))).to(inputs.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def recur_kernel(  # type: ignore[no-untyped-def]
    x,
    decays,
    rates,
    weight,
    bias,
    log_rates,
    times,
    skips,
    out,
    inputs,
    states,
    firsts,
    takens,
    rows,
    num_tokens,
    x_step,
    firsts_step,
    decays_step,
    decays_of_key_head,
    rates_step,
    rates_of_key_head,
    first_query,
    first_key,
    first_value,
    key_step,
    value_step,
    query_channel,
    key_channel,
    value_channel,
    num_inputs,
    num_kept,
    num_channels,
    least,
    most,
    rate_factor,
    HEADS: tl.constexpr,
    HEADS_OF_KEY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_BY_ROW: tl.constexpr,
):
    """Some values of a head of one row, token by token; with rates by the delta rule."""
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head, of_key_head = head // HEADS_OF_KEY, head % HEADS_OF_KEY
    row, first = tl.load(rows + sequence).to(tl.int64), tl.load(firsts + sequence * firsts_step)
    taken = num_tokens
    if takens is not None:
        taken = tl.load(takens + sequence).to(tl.int32)
    keys, values = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY, values < VALUE
    own = head * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    is_own = is_key[:, None] & is_value[None, :]
    before = states + (row * num_kept + (first + num_kept - 1) % num_kept) * (HEADS * KEY * VALUE)
    state = tl.load(before + own, mask=is_own & (first > 0), other=0.0)
    token, ring = sequence.to(tl.int64) * num_tokens, row * num_inputs
    query_at, key_at = first_query + key_head * key_step + keys, first_key + key_head * key_step + keys
    value_at = first_value + key_head * value_step + of_key_head * VALUE + values
    query_channels, key_channels = query_channel + key_head * KEY + keys, key_channel + key_head * KEY + keys
    value_channels = value_channel + head * VALUE + values
    is_writer = (of_key_head == 0) & (part == 0)
    log_rate = -tl.exp(tl.load(log_rates + head).to(tl.float32))
    for place in range(num_tokens):
        query = _silu(
            _convolved(
                x,
                inputs,
                weight,
                bias,
                ring,
                query_at,
                query_channels,
                is_key,
                first,
                token,
                place,
                taken,
                is_writer,
                x_step,
                num_inputs,
                num_channels,
                WIDTH,
            ),
            inputs,
        )
        key = _silu(
            _convolved(
                x,
                inputs,
                weight,
                bias,
                ring,
                key_at,
                key_channels,
                is_key,
                first,
                token,
                place,
                taken,
                is_writer,
                x_step,
                num_inputs,
                num_channels,
                WIDTH,
            ),
            inputs,
        )
        value = _silu(
            _convolved(
                x,
                inputs,
                weight,
                bias,
                ring,
                value_at,
                value_channels,
                is_value,
                first,
                token,
                place,
                taken,
                True,
                x_step,
                num_inputs,
                num_channels,
                WIDTH,
            ),
            inputs,
        )
        if IS_BY_ROW:
            at = decays + (token + place) * decays_step + head * KEY + keys
            time = tl.load(at, mask=is_key, other=0.0).to(tl.float32)
            time = _softplus(time + tl.load(times + head * KEY + keys, mask=is_key, other=0.0).to(tl.float32))
            state = state * tl.exp(log_rate * time)[:, None]
        else:
            at = decays + (token + place) * decays_step + key_head * decays_of_key_head + of_key_head
            time = _softplus(tl.load(at).to(tl.float32) + tl.load(times + head).to(tl.float32))
            time = tl.minimum(tl.maximum(time, least), most)
            state = state * tl.exp(log_rate * time)
        if rates is not None:
            query = query * tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * (KEY**-0.5)
            key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
            at = rates + (token + place) * rates_step + key_head * rates_of_key_head + of_key_head
            rate = 1.0 / (1.0 + tl.exp(-tl.load(at).to(tl.float32)))
            rate = rate.to(inputs.dtype.element_ty).to(tl.float32) * rate_factor
            added = rate * (value - tl.sum(key[:, None] * state, 0))
        else:
            added = value * time
        state += key[:, None] * added[None, :]
        read = tl.sum(query[:, None] * state, 0)
        if skips is not None:
            read += value * tl.load(skips + head).to(tl.float32)
        tl.store(out + ((token + place) * HEADS + head) * VALUE + values, read, mask=is_value)
        behind = states + (row * num_kept + (first + place) % num_kept) * (HEADS * KEY * VALUE)
        tl.store(behind + own, state, mask=is_own & (place < taken))


def recur(
    x_BTX: Tensor,
    decays: Tensor,
    rates: Tensor | None,
    layout: HeadLayout,
    places: Places,
    *,
    mixer: Any,  # noqa: ANN401
    dtype: torch.dtype,
    rate_factor: float = 1.0,
) -> Tensor:
    """Take in tokens, and keep the states after each.

    Args:
        x_BTX: the projected tokens.
        decays: decays before their functions, (B, T, key heads, heads of each), or (B, T, H * N).
        rates: rates of the delta rule, also before their function; None without a delta rule.
        layout: see `HeadLayout`.
        places: see `Places`; T is at most R.
        mixer: has `conv1d`, `A_log`, `dt_bias`, and may have `D` and `time_step_limit`.
        dtype: dtype of the outputs.
        rate_factor: factor of the rates.

    Returns:
        The outputs (B, T, H, P).
    """
    batch_size, num_tokens = x_BTX.shape[:2]
    _, num_heads, key_width, value_width = places.states.shape
    keys, values = tiles_of(key_width, value_width)
    out_BTHP = x_BTX.new_empty(batch_size, num_tokens, num_heads, value_width, dtype=dtype)
    least, most = getattr(mixer, "time_step_limit", (0.0, float("inf")))
    decay, weight = getattr(mixer, "forget_gate", mixer), mixer.conv1d.weight
    x_MX, decays_MHD = x_BTX.flatten(0, 1), decays.flatten(0, 1)
    rates_MHD = None if rates is None else rates.flatten(0, 1)
    rates_steps = (0, 0) if rates_MHD is None else rates_MHD.stride()[:2]
    recur_kernel[(triton.cdiv(value_width, values), num_heads, batch_size)](
        x_MX,
        decays_MHD,
        rates_MHD,
        weight,
        mixer.conv1d.bias,
        decay.A_log,
        decay.dt_bias,
        getattr(mixer, "D", None),
        out_BTHP,
        places.inputs,
        places.states,
        places.first_B1,
        places.taken_B,
        places.rows_B,
        num_tokens,
        x_MX.stride(0),
        places.first_B1.stride(0),
        *decays_MHD.stride()[:2],
        *rates_steps,
        *layout.firsts,
        *layout.steps,
        *layout.channels,
        places.num_inputs,
        places.num_kept,
        len(weight),
        float(least),
        float(most),
        rate_factor,
        HEADS=num_heads,
        HEADS_OF_KEY=num_heads // layout.num_key_heads,
        KEY=key_width,
        VALUE=value_width,
        KEYS=keys,
        VALUES=values,
        WIDTH=weight.shape[-1],
        IS_BY_ROW=decay is not mixer,
        num_warps=_WARPS,
    )
    return out_BTHP


def tiles_of(key_width: int, value_width: int) -> tuple[int, int]:
    """Rows and columns of the part of a state that a program has, in registers."""
    keys: int = triton.next_power_of_2(key_width)
    return keys, min(max(_NUMBERS_OF_A_PROGRAM // keys, 8), triton.next_power_of_2(value_width))
