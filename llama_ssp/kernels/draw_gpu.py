"""Triton kernels that draw tokens as `processors.draw` does, to the same ids, in two launches instead of twenty.

    sum_blocks     one program for each block of each row: the block's units
    pick_token     one program for each row: the block where the first uniform falls, the token where the second does

This module imports Triton; CPU builds of torch come without.

Shapes: B sequences, V vocabulary, P = 2 uniforms per draw, C blocks of M tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.kernels.chain_gpu import chained, release, wait


@triton.jit  # type: ignore[untyped-decorator]
def sum_blocks(  # type: ignore[no-untyped-def]
    weights, sums, units, vocab_size, num_blocks, TOKENS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Sum the integer units of one block of one row."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    release(PDL)
    wait(PDL)
    found = tl.load(weights + row * vocab_size + tokens, mask=tokens < vocab_size, other=0.0)
    tl.store(sums + row * num_blocks + block, tl.sum((found * units).to(tl.int64), 0))


@triton.jit
def _place(numbers, uniform, num_places):  # type: ignore[no-untyped-def]
    """The index where the running sum passes the given share of the total, below `num_places`; see `draw`."""
    running = tl.cumsum(numbers, 0)
    point = (tl.sum(numbers, 0).to(tl.float64) * uniform).to(tl.int64)
    is_place = tl.arange(0, numbers.shape[0]) < num_places
    return tl.minimum(tl.sum(((running <= point) & is_place).to(tl.int32), 0), num_places - 1)


@triton.jit  # type: ignore[untyped-decorator]
def pick_token(  # type: ignore[no-untyped-def]
    weights, sums, uniforms, ids, units, vocab_size, num_blocks, uniforms_stride,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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


def draw_tokens(weights_BV: Tensor, uniforms_BP: Tensor, *, units: float, tokens_of_a_block: int) -> Tensor:
    """Draw one token per row, int64 (B, 1), by weights in fp32 that are multiplied by `units`."""
    weights_BV = weights_BV.contiguous()
    batch_size, vocab_size = weights_BV.shape
    num_blocks = triton.cdiv(vocab_size, tokens_of_a_block)
    sums_BC = torch.empty(batch_size, num_blocks, dtype=torch.int64, device=weights_BV.device)
    ids_B1 = torch.empty(batch_size, 1, dtype=torch.int64, device=weights_BV.device)
    options = chained(weights_BV.device)
    sum_blocks[num_blocks, batch_size](
        weights_BV, sums_BC, units, vocab_size, num_blocks, TOKENS=tokens_of_a_block, num_warps=1, **options
    )
    pick_token[(batch_size,)](
        weights_BV, sums_BC, uniforms_BP, ids_B1, units, vocab_size, num_blocks, uniforms_BP.stride(0),
        TOKENS=tokens_of_a_block, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4, **options,
    )  # fmt: skip
    return ids_B1
