"""Triton kernels that make probabilities of logits and draw tokens as `processors.draw` does, to the same ids.

    block_peaks    one program for each block of each row: the largest logit, and the sum of exponentials below it
    block_probs    the same: the block's probabilities
    sum_blocks     one program for each block of a draw: the block's units, and over shards the token drawn in it
    pick_token     one program for each row: the block where the first uniform falls, the token where the second does

Shapes: B sequences, N rows of logits, V vocabulary, P = 2 uniforms per draw, C blocks of M tokens.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.architectures.engine import SOFTMAX_TOKENS
from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait

SOFTMAX_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(logits, row, block, scale, vocab_size, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    found = tl.load(logits + row * vocab_size + tokens, mask=tokens < vocab_size, other=float("-inf"))
    return tokens, found.to(tl.float32) * scale


@triton.jit  # type: ignore[untyped-decorator]
def block_peaks(  # type: ignore[no-untyped-def]
    logits, peaks, totals, scale, vocab_size, num_blocks, TOKENS: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit of one block of one row, times `scale`, and the sum of exponentials relative to it."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    release(PDL)
    wait(PDL)
    _, found = _scaled(logits, row, block, scale, vocab_size, TOKENS)
    peak = tl.max(found, 0)
    tl.store(peaks + row * num_blocks + block, peak)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(totals + row * num_blocks + block, tl.sum(tl.exp(found - shift), 0))


@triton.jit  # type: ignore[untyped-decorator]
def block_probs(  # type: ignore[no-untyped-def]
    logits,
    peaks,
    totals,
    probs,
    scale,
    vocab_size,
    num_blocks,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The probabilities of one block of one row."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    release(PDL)
    wait(PDL)
    peaks_C = tl.load(peaks + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    totals_C = tl.load(totals + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    peak = tl.max(peaks_C, 0)
    total = tl.sum(totals_C * tl.exp(peaks_C - peak), 0)
    tokens, found = _scaled(logits, row, block, scale, vocab_size, TOKENS)
    tl.store(probs + row * vocab_size + tokens, tl.exp(found - peak) / total, mask=tokens < vocab_size)


@triton.jit
def _place(numbers, uniform, num_places):  # type: ignore[no-untyped-def]
    """The index where the running sum passes the given share of the total, below `num_places`; see `draw`."""
    running = tl.cumsum(numbers, 0)
    point = (tl.sum(numbers, 0).to(tl.float64) * uniform).to(tl.int64)
    is_place = tl.arange(0, numbers.shape[0]) < num_places
    return tl.minimum(tl.sum(((running <= point) & is_place).to(tl.int32), 0), num_places - 1)


@triton.jit  # type: ignore[untyped-decorator]
def sum_blocks(  # type: ignore[no-untyped-def]
    weights,
    uniforms,
    sums,
    units,
    vocab_size,
    num_blocks,
    uniforms_stride,
    TOKENS: tl.constexpr,
    DRAWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the integer units of one block of one row; with `DRAWS` also pick a token of it, by the second uniform."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    release(PDL)
    wait(PDL)
    found = tl.load(weights + row * vocab_size + tokens, mask=tokens < vocab_size, other=0.0)
    numbers = (found * units).to(tl.int64)
    tl.store(sums + (1 + DRAWS) * row * num_blocks + block, tl.sum(numbers, 0))
    if DRAWS:
        place = _place(numbers, tl.load(uniforms + row * uniforms_stride + 1), TOKENS)
        chosen = tl.minimum(block * TOKENS + place, vocab_size - 1).to(tl.int64)
        tl.store(sums + (2 * row + 1) * num_blocks + block, chosen)


@triton.jit  # type: ignore[untyped-decorator]
def pick_token(  # type: ignore[no-untyped-def]
    weights,
    sums,
    uniforms,
    ids,
    units,
    vocab_size,
    num_blocks,
    uniforms_stride,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pick a block of one row by its first uniform, and a token of it by the second."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    release(PDL)
    wait(PDL)
    sums_C = tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0)
    block = _place(sums_C, tl.load(uniforms + row * uniforms_stride), num_blocks)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    found = tl.load(weights + row * vocab_size + tokens, mask=tokens < vocab_size, other=0.0)
    place = _place((found * units).to(tl.int64), tl.load(uniforms + row * uniforms_stride + 1), TOKENS)
    tl.store(ids + row, tl.minimum(block * TOKENS + place, vocab_size - 1).to(tl.int64))


def softmax(logits_NV: Tensor, *, scale: float, join: Callable[..., Tensor] | None = None) -> Tensor:
    """The probabilities (N, V) in fp32 of logits times `scale`.

    `join` joins the peaks and totals (N, 2, C) of the blocks of all ranks that have parts of the logits.
    """
    logits_NV = logits_NV.contiguous()
    num_rows, vocab_size = logits_NV.shape
    num_blocks = triton.cdiv(vocab_size, SOFTMAX_TOKENS)
    peaks_NC, totals_NC = logits_NV.new_empty(2, num_rows, num_blocks, dtype=torch.float32)
    probs_NV = torch.empty_like(logits_NV, dtype=torch.float32)
    options = chained(logits_NV.device)
    block_peaks[num_blocks, num_rows](
        logits_NV,
        peaks_NC,
        totals_NC,
        scale,
        vocab_size,
        num_blocks,
        TOKENS=SOFTMAX_TOKENS,
        num_warps=SOFTMAX_WARPS,
        **options,
    )
    if join:
        both_N2C = join(torch.stack([peaks_NC, totals_NC], dim=1), tokens=SOFTMAX_TOKENS)
        peaks_NC, totals_NC = both_N2C.transpose(0, 1).contiguous()
    num_joined = peaks_NC.shape[1]
    block_probs[num_blocks, num_rows](
        logits_NV,
        peaks_NC,
        totals_NC,
        probs_NV,
        scale,
        vocab_size,
        num_joined,
        TOKENS=SOFTMAX_TOKENS,
        BLOCKS=triton.next_power_of_2(num_joined),
        num_warps=SOFTMAX_WARPS,
        **options,
    )
    return probs_NV


def draw_tokens(weights_BV: Tensor, uniforms_BP: Tensor, units: float, tokens_of_a_block: int) -> Tensor:
    """Draw one token per row, int64 (B, 1), by weights in fp32 that are multiplied by `units`."""
    weights_BV = weights_BV.contiguous()
    sums_BC = _summed(weights_BV, uniforms_BP, units=units, tokens=tokens_of_a_block, num_kinds=1)[:, 0]
    (batch_size, vocab_size), num_blocks = weights_BV.shape, sums_BC.shape[1]
    ids_B1 = torch.empty(batch_size, 1, dtype=torch.int64, device=weights_BV.device)
    pick_token[(batch_size,)](
        weights_BV,
        sums_BC,
        uniforms_BP,
        ids_B1,
        units,
        vocab_size,
        num_blocks,
        uniforms_BP.stride(0),
        TOKENS=tokens_of_a_block,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=4,
        **chained(weights_BV.device),
    )
    return ids_B1


def draw_in_blocks(weights_BV: Tensor, uniforms_BP: Tensor, units: float, tokens_of_a_block: int) -> Tensor:
    """The units of each block, and the token that is drawn in it, int64 (B, 2, C)."""
    return _summed(weights_BV.contiguous(), uniforms_BP, units=units, tokens=tokens_of_a_block, num_kinds=2)


def _summed(weights_BV: Tensor, uniforms_BP: Tensor, *, units: float, tokens: int, num_kinds: int) -> Tensor:
    """Return the units of each block, and with two kinds of numbers also a token of it, int64 (B, kinds, C)."""
    batch_size, vocab_size = weights_BV.shape
    num_blocks = triton.cdiv(vocab_size, tokens)
    found = torch.empty(batch_size, num_kinds, num_blocks, dtype=torch.int64, device=weights_BV.device)
    sum_blocks[num_blocks, batch_size](
        weights_BV,
        uniforms_BP,
        found,
        units,
        vocab_size,
        num_blocks,
        uniforms_BP.stride(0),
        TOKENS=tokens,
        DRAWS=num_kinds > 1,
        num_warps=1,
        **chained(weights_BV.device),
    )
    return found
