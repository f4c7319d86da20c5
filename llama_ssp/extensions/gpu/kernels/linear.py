"""A Triton kernel for products of a few rows with weights in 16, 8 or 4 bits; torch's are below memory bandwidth.

Each block computes some outputs of a few rows, and its warps share out the inputs: every weight is read, converted and
multiplied by one warp alone. A matrix that would leave most multiprocessors idle is split over its inputs, too, and a
second kernel adds the parts. `tiles_of` chooses both. Blocks that read the same weights are neighbours.

    block   = OUTPUTS outputs x ROWS rows x the inputs of one split
    step    | warp 0: INPUTS | warp 1: INPUTS | ... | warp 7: INPUTS |  the next step: the same again
    row     = the sum of its steps in each warp, of the warps in pairs, of the splits in order

A row's sum has one order, whatever rows are next to it: tiles of 8, 16 and 32 rows use the same instruction, and the
inputs of a warp and a split depend on the matrix alone.

In int4 the inputs of a warp are one group of `weights.byte_rows`: the first half of the group is in the low halves of
bytes, the second in the high halves, so that both are multiplied where they are. The warp scales their sum. In FP8,
where a warp's inputs are half a group, it scales their sum too. The bits of an FP8 number, shifted, are those of an
fp16 number that is 2^-8 times as large; for a 4-bit float 2^-14 times. A warp has 32 such floats, and in NVFP4 each
half of them has its own scale.

Experts are matrices of one shape whose outputs follow each other. The rows of a block are then pairs of a
token and an expert, the same one, which `choose` finds without the host; there are as many blocks as there may be.

Shapes: M rows, I inputs, O outputs, S splits, G groups of 128, 64 or 32 inputs; P pairs of a token and one of the K
experts that it chose, N blocks of them.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_ssp.extensions.gpu.kernels.chain import chained, release, wait
from llama_ssp.storage.formats import FP4_GROUP, INT4_ZERO_BITS

_BYTES_TO_FP16 = tl.constexpr("""
{
.reg .b32 flipped, offset;
xor.b32 flipped, $2, 0x80808080;
mov.b32 offset, 0x64806480;
prmt.b32 $0, flipped, 0x64646464, 0x4140;
prmt.b32 $1, flipped, 0x64646464, 0x4342;
sub.f16x2 $0, $0, offset;
sub.f16x2 $1, $1, offset;
}
""")
"""Four int8 values in two registers of fp16: 0x6400 | (q + 128) is the number 1152 + q."""
_BYTES_TO_BF16 = tl.constexpr("""
{
.reg .b32 low, high, minus;
mov.b32 minus, 0xbf80bf80;
prmt.b32 low, $2, 0x43434343, 0x4140;
prmt.b32 high, $2, 0x43434343, 0x4342;
and.b32 $0, low, 0xff7fff7f;
and.b32 $1, high, 0xff7fff7f;
and.b32 low, low, 0xff80ff80;
and.b32 high, high, 0xff80ff80;
fma.rn.bf16x2 $0, low, minus, $0;
fma.rn.bf16x2 $1, high, minus, $1;
}
""")
"""Four int8 values in two registers of bf16: 0x4300 | its low 7 bits is 128 more, and 0x4300 | its sign 128 or 256."""

_HALVES_TO_FP16 = tl.constexpr("""
{
.reg .b32 low, high, minus;
mov.b32 minus, 0xbc00bc00;
and.b32 low, $4, 0x0f0f0f0f;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0f0f0f0f;
prmt.b32 $0, low, 0x64646464, 0x4140;
prmt.b32 $1, low, 0x64646464, 0x4342;
prmt.b32 $2, high, 0x64646464, 0x4140;
prmt.b32 $3, high, 0x64646464, 0x4342;
fma.rn.f16x2 $0, $5, minus, $0;
fma.rn.f16x2 $1, $6, minus, $1;
fma.rn.f16x2 $2, $5, minus, $2;
fma.rn.f16x2 $3, $6, minus, $3;
}
""")
"""The low and the high halves of four bytes, less their zeros: 0x6400 | code is 1024 + code, and zeros come as such."""
_HALVES_TO_BF16 = tl.constexpr(
    _HALVES_TO_FP16.value.replace("0x64646464", "0x43434343")
    .replace("0xbc00bc00", "0xbf80bf80")
    .replace("f16x2", "bf16x2")
)
"""The low and the high halves of four bytes in bf16, less their zeros: 0x4300 | code is 128 + code."""
_ZERO_BITS = tl.constexpr(INT4_ZERO_BITS)


@triton.jit  # type: ignore[untyped-decorator]
def _converted(bytes_tile, HALF: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes as fp16 or bf16, which hold them exactly; by PTX without the slow integer-to-float instruction."""
    if PTX:
        program: tl.constexpr = _BYTES_TO_FP16 if tl.float16 == HALF else _BYTES_TO_BF16
        numbers = tl.inline_asm_elementwise(program, "=r,=r,r", [bytes_tile], HALF.value, is_pure=True, pack=4)
    else:
        numbers = bytes_tile.to(tl.float32).to(HALF)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _converted_halves(bytes_tile, words, HALF: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The codes in the low and the high halves of the bytes, less the zeros of their words, as fp16 or bf16."""
    zeros = words & _ZERO_BITS
    if PTX:
        program: tl.constexpr = _HALVES_TO_FP16 if tl.float16 == HALF else _HALVES_TO_BF16
        nothing: tl.constexpr = 0x6400 if tl.float16 == HALF else 0x4300
        zeros = (zeros | nothing).to(tl.int16).to(HALF, bitcast=True)[:, :, None]
        low, high = tl.inline_asm_elementwise(
            program, "=&r,=&r,=&r,=&r,r,r,r", [bytes_tile, zeros], (HALF.value, HALF.value), is_pure=True, pack=4
        )
    else:
        zeros = zeros.to(tl.float32)[:, :, None]
        low = ((bytes_tile & 15).to(tl.float32) - zeros).to(HALF)
        high = ((bytes_tile >> 4).to(tl.float32) - zeros).to(HALF)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _converted_floats(bytes_tile, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in E4M3 as fp16 or bf16, times 2^-8."""
    bits = ((bytes_tile.to(tl.int16) << 7) & -16385).to(tl.int16)
    numbers = bits.to(tl.float16, bitcast=True)
    if tl.float16 != HALF:
        numbers = numbers.to(tl.float32).to(HALF)
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def _converted_codes(codes, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in E2M1 as fp16 or bf16, times 2^-14."""
    codes = codes.to(tl.int16)
    numbers = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    if tl.float16 != HALF:
        numbers = numbers.to(tl.float32).to(HALF)
    return numbers


@triton.jit
def _scales(found):  # type: ignore[no-untyped-def]
    """Scales in E8M0 (uint8) or E4M3 (int8) as fp32."""
    if found.dtype == tl.uint8:
        numbers = (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        numbers = _converted_floats(found, tl.float16).to(tl.float32) * 256.0
    return numbers


@triton.jit
def _added(total, weight_tile, x_tile):  # type: ignore[no-untyped-def]
    """Add the product of a tile of weights in fp16 or bf16 with inputs in any format."""
    x_tile = tl.permute(x_tile, (0, 2, 1))
    if x_tile.dtype == tl.float32:
        # Three bf16 numbers hold a fp32 number, and one holds a weight: the products are exact.
        large = x_tile.to(weight_tile.dtype)
        rest = x_tile - large.to(tl.float32)
        middle = rest.to(weight_tile.dtype)
        total = tl.dot(weight_tile, (rest - middle.to(tl.float32)).to(weight_tile.dtype), total)
        total = tl.dot(weight_tile, middle, total)
        x_tile = large
    return tl.dot(weight_tile, x_tile, total)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_warps(total, WARPS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the warps' sums, 4, 8 or 16, in pairs."""
    sums = tl.permute(total, (1, 2, 0))
    pairs = tl.split(tl.reshape(sums, (OUTPUTS, ROWS, WARPS // 2, 2)))
    pairs = tl.split(tl.reshape(pairs[0] + pairs[1], (OUTPUTS, ROWS, WARPS // 4, 2)))
    if WARPS // 4 > 1:
        pairs = tl.split(tl.reshape(pairs[0] + pairs[1], (OUTPUTS, ROWS, WARPS // 8, 2)))
    if WARPS // 8 > 1:
        pairs = tl.split(tl.reshape(pairs[0] + pairs[1], (OUTPUTS, ROWS, 2)))
    return tl.reshape(pairs[0] + pairs[1], (OUTPUTS, ROWS))


@triton.jit
def store(  # type: ignore[no-untyped-def]
    total, scales, bias, residual, y, outputs, places, is_stored
):
    """Multiply a sum by scales, add bias and residual, each where there are any; outputs and places have its shape."""
    if scales is not None:
        total *= tl.load(scales + outputs, mask=is_stored, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + outputs, mask=is_stored, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + places, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x,
    weight,
    words,
    scales,
    bias,
    residual,
    y,
    blocks,
    num_rows,
    num_outputs,
    num_inputs,
    words_stride,
    split_inputs,
    num_chosen,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one block: loop over steps, and add the warps' sums; the sums of a split are stored as they are.

    With `blocks` of pairs, each reads the row of its token, a number of pairs that `num_chosen` divides.
    """
    wait(PDL)
    if blocks is None:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_row, x_rows, before = rows < num_rows, rows, 0
    else:
        block = blocks + tl.program_id(0) * (ROWS + 2)
        num_pairs = tl.load(block + 1)
        if num_pairs == 0:
            return
        is_row = tl.arange(0, ROWS) < num_pairs
        rows = tl.load(block + 2 + tl.arange(0, ROWS), mask=is_row, other=0)
        x_rows, before = rows // num_chosen, tl.load(block) * num_outputs
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    has_codes: tl.constexpr = weight.dtype.element_ty == tl.uint8
    byte_weights: tl.constexpr = 2 if has_codes else 1
    warp_bytes: tl.constexpr = INPUTS // byte_weights
    warps = tl.arange(0, WARPS)[:, None]
    bytes_ = tl.arange(0, warp_bytes)[None, :]
    inputs = warps * INPUTS + bytes_
    # Rows of the weight after the last one are read as the last one, and not stored.
    read = before + tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    x_places = x + (x_rows * num_inputs)[None, :, None] + inputs[:, None, :]
    weight_places = (
        weight + (read * (num_inputs // byte_weights))[None, :, None] + (warps * warp_bytes + bytes_)[:, None, :]
    )
    half: tl.constexpr = tl.float16 if x.dtype.element_ty == tl.float16 else tl.bfloat16
    total = tl.zeros((WARPS, OUTPUTS, ROWS), dtype=tl.float32)
    first = tl.program_id(2) * split_inputs
    for start in range(first, tl.minimum(first + split_inputs, num_inputs), WARPS * INPUTS):
        is_input = (inputs < num_inputs - start)[:, None, :]
        is_x = is_row[None, :, None] & is_input
        x_tile = tl.load(x_places + start, mask=is_x, other=0.0)
        bytes_tile = tl.load(weight_places + start // byte_weights, mask=is_input, other=0)
        if GROUP > 0:
            groups = (start + warps * INPUTS) // GROUP
            word_places = words + groups * words_stride + read[None, :]
            is_group = groups * GROUP < num_inputs
            word = tl.load(word_places, mask=is_group, other=0)
        if has_codes:
            others = tl.load(x_places + start + warp_bytes, mask=is_x, other=0.0)
            none = tl.zeros((WARPS, OUTPUTS, ROWS), dtype=tl.float32)
            if word.dtype == tl.int32:
                low, high = _converted_halves(bytes_tile, word, half, PTX)
                part = _added(_added(none, low, x_tile), high, others)
                total += part * (word & ~_ZERO_BITS).to(tl.float32, bitcast=True)[:, :, None]
            else:
                low, high = _converted_codes(bytes_tile & 15, half), _converted_codes(bytes_tile >> 4, half)
                part = _added(none, low, x_tile) * (_scales(word) * 16384.0)[:, :, None]
                # Where halves have one scale, it is read again from the cache.
                word = tl.load(word_places + (INPUTS // GROUP - 1) * words_stride, mask=is_group, other=0)
                total += part + _added(none, high, others) * (_scales(word) * 16384.0)[:, :, None]
        elif GROUP > 0:
            numbers = _converted_floats(bytes_tile, half)
            part = _added(tl.zeros((WARPS, OUTPUTS, ROWS), dtype=tl.float32), numbers, x_tile)
            total += part * (word * 256.0)[:, :, None]
        else:
            if bytes_tile.dtype != half:
                bytes_tile = _converted(bytes_tile, half, PTX)
            total = _added(total, bytes_tile, x_tile)
    release(PDL)
    result = _sum_of_warps(total, WARPS, OUTPUTS, ROWS)
    places = rows[None, :] * num_outputs + outputs[:, None]
    is_stored = is_output[:, None] & is_row[None, :]
    if IS_SPLIT:
        y += tl.program_id(2).to(tl.int64) * num_rows * num_outputs
        tl.store(y + places, result, mask=is_stored)
    else:
        outputs = tl.broadcast_to(before + outputs[:, None], (OUTPUTS, ROWS))
        store(result, scales, bias, residual, y, outputs, places, is_stored)


@triton.jit(do_not_specialize=["num_elements"])  # type: ignore[untyped-decorator]
def _sum_of_splits(  # type: ignore[no-untyped-def]
    parts,
    scales,
    bias,
    residual,
    y,
    experts,
    num_splits,
    num_elements,
    num_outputs,
    num_experts,
    ELEMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the splits (S, M, O) in order; with `experts` of the rows, only of experts that are here."""
    places = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = places < num_elements
    outputs = places % num_outputs
    release(PDL)
    wait(PDL)
    if experts is not None:
        expert = tl.load(experts + places // num_outputs, mask=is_element, other=num_experts).to(tl.int32)
        is_element &= expert < num_experts
        outputs += expert * num_outputs
    total = tl.zeros((ELEMENTS,), dtype=tl.float32)
    for split in range(num_splits):
        total += tl.load(parts + split * num_elements + places, mask=is_element, other=0.0)
    store(total, scales, bias, residual, y, outputs, places, is_element)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _find_block(  # type: ignore[no-untyped-def]
    experts, blocks, num_pairs, num_experts, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):
    """Write the expert of a block, how many of its pairs are there, and which."""
    counts = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        counts += tl.histogram(
            tl.load(experts + pairs, mask=pairs < num_pairs, other=num_experts).to(tl.int32), EXPERTS
        )
    numbers = tl.arange(0, EXPERTS)
    sizes = tl.where(numbers < num_experts, tl.cdiv(counts, ROWS), 0)
    ends = tl.cumsum(sizes, 0)
    expert = tl.sum((ends <= tl.program_id(0)).to(tl.int32), 0)  # after the last block no expert's number
    is_own = numbers == expert
    passed = (tl.program_id(0) - tl.sum(tl.where(is_own, ends - sizes, 0), 0)) * ROWS
    num_left = tl.sum(tl.where(is_own, counts, 0), 0) - passed
    block = blocks + tl.program_id(0) * (ROWS + 2)
    tl.store(block, expert)
    tl.store(block + 1, tl.minimum(tl.maximum(num_left, 0), ROWS))
    place = -passed - 1
    for start in range(0, num_pairs, PAIRS):
        pairs = start + tl.arange(0, PAIRS)
        chosen = tl.load(experts + pairs, mask=pairs < num_pairs, other=num_experts).to(tl.int32)
        is_here = (chosen == expert).to(tl.int32)
        places = place + tl.cumsum(is_here, 0)
        tl.store(block + 2 + places, pairs, mask=(is_here > 0) & (places >= 0) & (places < ROWS))
        place += tl.sum(is_here, 0)


@triton.jit(do_not_specialize=["num_inputs"])  # type: ignore[untyped-decorator]
def _unpack_codes(  # type: ignore[no-untyped-def]
    codes, words, scales, into, num_inputs, words_stride, HALF: tl.constexpr, GROUP: tl.constexpr
):
    """Write the numbers (code - zero) * scale of 16 groups of one output, or E2M1 * scales, rounded once."""
    row, groups = tl.program_id(0).to(tl.int64), tl.program_id(1) * 16 + tl.arange(0, 16)
    bytes_ = tl.arange(0, HALF)
    is_here = (groups * 2 * HALF < num_inputs)[:, None]
    places = row * (num_inputs // 2) + groups[:, None] * HALF + bytes_[None, :]
    found = tl.load(codes + places, mask=is_here, other=0)
    word_places, ratio = words + groups * (2 * HALF // GROUP) * words_stride + row, 2 * HALF // GROUP
    word = tl.load(word_places, mask=groups * 2 * HALF < num_inputs, other=0)
    if word.dtype == tl.int32:
        zero = (word & _ZERO_BITS).to(tl.float32)[:, None]
        scale = (word & ~_ZERO_BITS).to(tl.float32, bitcast=True)[:, None]
        low, high = ((found & 15).to(tl.float32) - zero) * scale, ((found >> 4).to(tl.float32) - zero) * scale
    else:
        factor = tl.load(scales + row) * 16384.0
        other = tl.load(word_places + (ratio - 1) * words_stride, mask=groups * 2 * HALF < num_inputs, other=0)
        low = _converted_codes(found & 15, tl.float16).to(tl.float32) * _scales(word)[:, None] * factor
        high = _converted_codes(found >> 4, tl.float16).to(tl.float32) * _scales(other)[:, None] * factor
    target = into + row * num_inputs + groups[:, None] * 2 * HALF + bytes_[None, :]
    dtype: tl.constexpr = into.dtype.element_ty
    tl.store(target, low.to(dtype), mask=is_here)
    tl.store(target + HALF, high.to(dtype), mask=is_here)


@triton.jit(do_not_specialize=["num_inputs"])  # type: ignore[untyped-decorator]
def _unpack_bytes(numbers, scales, into, num_inputs, INPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write some inputs of one output, times its scale, rounded once."""
    row, inputs = tl.program_id(0).to(tl.int64), tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    is_here = inputs < num_inputs
    exact = tl.load(numbers + row * num_inputs + inputs, mask=is_here, other=0).to(tl.float32)
    tl.store(into + row * num_inputs + inputs, (exact * tl.load(scales + row)).to(into.dtype.element_ty), mask=is_here)


def unpack_bytes(bytes_CI: Tensor, scales_C: Tensor, into_CI: Tensor) -> None:
    """Write int8 weights as numbers; all are contiguous."""
    num_outputs, num_inputs = into_CI.shape
    _unpack_bytes[(num_outputs, triton.cdiv(num_inputs, _UNPACKED_AT_ONCE))](
        bytes_CI, scales_C, into_CI, num_inputs, INPUTS=_UNPACKED_AT_ONCE, num_warps=4
    )


def unpack_codes(codes_CI: Tensor, words_GC: Tensor, into_CI: Tensor, scales_C: Tensor | None = None) -> None:
    """Write int4 weights, or with scales of outputs floats, as numbers; codes (C, I / 2) and these are contiguous."""
    num_outputs, num_inputs = into_CI.shape
    group = num_inputs // len(words_GC)
    packed = group if scales_C is None else FP4_GROUP
    _unpack_codes[(num_outputs, triton.cdiv(num_inputs, 16 * packed))](
        codes_CI,
        _as_bytes(words_GC),
        scales_C,
        into_CI,
        num_inputs,
        words_GC.stride(0),
        HALF=packed // 2,
        GROUP=group,
        num_warps=4,
    )


def _as_bytes(numbers: Tensor) -> Tensor:
    """Numbers of 8 bits as integers, which the kernel reads: E8M0 as uint8, E4M3 as int8."""
    kinds = {torch.float8_e8m0fnu: torch.uint8, torch.float8_e4m3fn: torch.int8}
    return numbers.view(kinds.get(numbers.dtype, numbers.dtype))


WARP_INPUTS = 64
"""Inputs of a warp in a step, unless another number was measured to be faster."""
STEP = 512
"""Inputs that all warps read in a step."""
_LEAST_SAVED = 4
"""Steps that a split must save, since it needs a second kernel; a step takes about a quarter of a microsecond."""
_SUMMED = 1024
_UNPACKED_AT_ONCE = 4096
PAIRS = 256
"""Pairs of a token and an expert that a block scans per step."""
_HAS_PTX = torch.version.hip is None and not triton.knobs.runtime.interpret


class Tiles(NamedTuple):
    """Tiles of a product.

    Attributes:
        rows: rows of a block, padded.
        outputs: outputs of a block.
        split_inputs: inputs of a split, a multiple of STEP.
        warp_inputs: inputs of a warp in a step.
        num_warps: warps of a block.
        num_stages: number of steps that are being loaded, plus the one that is computed.
        grid: numbers of blocks over rows, outputs and splits.
    """

    rows: int
    outputs: int
    split_inputs: int
    warp_inputs: int
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]


def tiles_of(
    *,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    num_processors: int,
    value_bytes: int,
    weight_bits: int = 8,
    group: int = 0,
) -> Tiles:
    """Cut a product for a GPU with `num_processors`; only the tile of rows depends on the number of rows.

    Matrices that would leave half of the multiprocessors idle have small blocks, and if these do, too, they are split
    over the inputs. On an H200, 4096 outputs of int4 took 6.4 us in blocks of 32, and 7.4 in blocks of 16.
    The figures follow from ptxas and from the memory: 32 outputs and 512 inputs are 16 KiB of int8 weights in a step,
    two or three steps are on their way at a time, and a block fits into 99 KiB of shared memory, which every GPU since
    2020 has. In 4 bits a warp has one group, and there are as many warps as give 512 inputs. Four warps with 128 inputs
    each were faster than eight with 64 on an H200: `docs/findings/gpus.md`.

    `value_bytes` is the size of an input, and `group` the inputs that share a word, 0 for no words.
    """
    # In fp32 every output of a warp shares the splitting of its inputs into three.
    is_half = value_bytes == 2
    has_halves = weight_bits == 16
    outputs = 16 if has_halves or (is_half and 2 * triton.cdiv(num_outputs, 32) <= num_processors) else 32
    num_steps = triton.cdiv(num_inputs, STEP)
    split_steps = triton.cdiv(num_steps, max(num_processors // triton.cdiv(num_outputs, outputs), 1))
    if num_steps - split_steps < _LEAST_SAVED:
        split_steps = num_steps
    rows = _rows_of_a_block(num_rows, value_bytes)
    is_wide = is_half and not group
    warp_inputs = max(group, FP4_GROUP) if weight_bits == 4 else WARP_INPUTS * (2 if is_wide else 1)
    return Tiles(
        rows=rows,
        outputs=outputs,
        split_inputs=split_steps * STEP,
        warp_inputs=warp_inputs,
        num_warps=STEP // warp_inputs,
        num_stages=4 if not is_wide and rows * value_bytes <= 32 else 3,
        grid=(triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, outputs), triton.cdiv(num_steps, split_steps)),
    )


def _rows_of_a_block(num_rows: int, value_bytes: int) -> int:
    return next((rows for rows in (8, 16) if num_rows <= rows), 32 if value_bytes == 2 else 16)


class Chosen(NamedTuple):
    """The pairs of tokens and experts, in blocks; see `choose`.

    Attributes:
        experts_P: experts of the pairs; the pairs of a token follow each other.
        blocks_NR: int32; for each block its expert, its number of pairs, and the pairs; unused blocks have 0 pairs.
        num_experts: number of experts on this rank.
        num_chosen: number of experts that a token chooses.
    """

    experts_P: Tensor
    blocks_NR: Tensor
    num_experts: int
    num_chosen: int


def choose(experts_MK: Tensor, num_experts: int, *, value_bytes: int) -> Chosen:
    """Cut the pairs of tokens and the experts that they chose into blocks of one expert, without the host.

    `num_experts` itself stands for all experts that are not here. A block has room for twice the pairs that an expert
    has in the mean; `value_bytes` is the size of an input.
    """
    num_tokens, num_chosen = experts_MK.shape
    num_pairs = experts_MK.numel()
    rows = _rows_of_a_block(min(num_tokens, 2 * triton.cdiv(num_pairs, num_experts)), value_bytes)
    num_first = min(num_pairs, num_experts)  # an expert has one block, and another one per `rows` further pairs
    num_blocks = num_first + (num_pairs - num_first) // rows
    experts_P = experts_MK.flatten()
    blocks_NR = torch.empty(num_blocks, rows + 2, dtype=torch.int32, device=experts_P.device)
    _find_block[(num_blocks,)](
        experts_P,
        blocks_NR,
        num_pairs,
        num_experts,
        PAIRS=PAIRS,
        EXPERTS=triton.next_power_of_2(num_experts + 1),
        ROWS=rows,
        num_warps=4,
    )
    return Chosen(experts_P, blocks_NR, num_experts, num_chosen)


def product_of_few_rows(
    x_MI: Tensor,
    weight_OI: Tensor,
    scales: Tensor | None = None,
    scales_O: Tensor | None = None,
    *,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    chosen: Chosen | None = None,
) -> Tensor:
    """Compute x W^T + bias + residual, rounded once.

    With `chosen` experts the operands are of all experts, whose outputs follow each other. The products (P, O) of the
    pairs are 0 where an expert is not here.

    Args:
        x_MI: inputs in fp32, bf16 or fp16; with `chosen` of the tokens, or of the pairs (P, I).
        weight_OI: int8, E4M3 or the dtype of x (O, I), or the bytes of codes (O, I / 2) in uint8; contiguous.
        scales: scales of the outputs (O,), in fp32; for E4M3 those of the groups (G, O), for int4 the words of groups,
            for floats of 4 bits those of the groups in E8M0 or E4M3; rows are contiguous. None for weights in the dtype
            of x.
        scales_O: scales of the outputs of floats of 4 bits, in fp32.
        bias_O: the bias, in the dtype of x like the residual; None for no bias.
        residual_MO: the residual; None for no residual.
        chosen: the experts of the tokens; None for one matrix.
    """
    x_MI = x_MI.contiguous()
    residual_MO = None if residual_MO is None else residual_MO.contiguous()
    num_rows, num_inputs = x_MI.shape
    num_processors = _num_processors(x_MI.device)
    num_outputs, rows, blocks_NR, experts_P, num_experts, ratio = len(weight_OI), num_rows, None, None, 1, 1
    if chosen:
        experts_P, blocks_NR, num_experts, num_chosen = chosen
        rows, ratio, num_rows = blocks_NR.shape[1] - 2, len(experts_P) // num_rows, len(experts_P)
        # The experts of one token share the multiprocessors, however many tokens there are.
        num_outputs, num_processors = num_outputs // num_experts, max(num_processors // num_chosen, 1)
    words = None if scales is None or scales.ndim == 1 else _as_bytes(scales)
    scales_O = scales if words is None else scales_O
    group = 0 if words is None else num_inputs // len(words)
    weight_OI = _as_bytes(weight_OI)
    tiles = tiles_of(
        num_rows=rows,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        num_processors=num_processors,
        value_bytes=x_MI.element_size(),
        group=group,
        weight_bits=4 if weight_OI.dtype is torch.uint8 else 8 * weight_OI.element_size(),
    )
    y_MO = (x_MI.new_zeros if chosen else x_MI.new_empty)(num_rows, num_outputs)
    num_splits, length, options = tiles.grid[2], y_MO.numel(), chained(x_MI.device)
    is_split = num_splits > 1
    parts = x_MI.new_empty(num_splits, num_rows, num_outputs, dtype=torch.float32) if is_split else y_MO
    _product[tiles.grid if blocks_NR is None else (len(blocks_NR), *tiles.grid[1:])](
        x_MI,
        weight_OI,
        words,
        scales_O,
        bias_O,
        residual_MO,
        parts,
        blocks_NR,
        num_rows,
        num_outputs,
        num_inputs,
        0 if words is None else words.stride(0),
        tiles.split_inputs,
        ratio,
        ROWS=tiles.rows,
        OUTPUTS=tiles.outputs,
        INPUTS=tiles.warp_inputs,
        WARPS=tiles.num_warps,
        GROUP=group,
        IS_SPLIT=is_split,
        PTX=_HAS_PTX,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if is_split:
        _sum_of_splits[(triton.cdiv(length, _SUMMED),)](
            parts,
            scales_O,
            bias_O,
            residual_MO,
            y_MO,
            experts_P,
            num_splits,
            length,
            num_outputs,
            num_experts,
            ELEMENTS=_SUMMED,
            **options,
        )
    return y_MO


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
