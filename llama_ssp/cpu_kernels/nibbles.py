"""Sums of a tile with 4-bit weights, a scale and a zero per group of 128 inputs; `products` does the rest.

A word of 32 bits holds eight inputs of an output, the first in its lowest bits, and a vector the words of a block's
outputs. The codes of a group are multiplied as numbers from -8 to 7, and the rest of the zero is subtracted from their
sum, once; most zeros are near 8, so little is lost:

    block | group | group | ...
    group | 16 words of `int4_rows`, a scale and a zero each | inputs 0-7: 16 words | inputs 8-15: 16 words | ...
"""

from llvmlite import ir

from llama_ssp.config.formats import INT4_GROUP as GROUP
from llama_ssp.config.formats import WORD_BYTES
from llama_ssp.cpu_kernels.emit import F32, F32S, I32S, LANES, Code, Value, f32, floats, i64
from llama_ssp.weights.int4_rows import ZERO_BITS

INPUTS_OF_WORD = 8
_CODE_BITS, _MIDDLE = 4, 8
HEAD_BYTES = LANES * WORD_BYTES
GROUP_BYTES = HEAD_BYTES + LANES * GROUP // 2
"""Of one block."""


def _words(number: int) -> Value:
    """A vector of equal constants."""
    return ir.Constant(I32S, [number] * LANES)


def block_bytes(code: Code, num_inputs: Value) -> Value:
    """Bytes of the weights of 16 outputs."""
    return code.mul(code.sdiv(num_inputs, i64(GROUP)), i64(GROUP_BYTES))


def sums(code: Code, blocks: list[Value], rows: list[Value], num_inputs: Value) -> list[Value]:
    """Sum over all inputs, for some rows and blocks; returns the vectors, rows first.

    Args:
        code: of the tile.
        blocks: addresses of their weights.
        rows: addresses of their inputs in fp32.
        num_inputs: a multiple of `GROUP`.
    """
    number = len(rows) * len(blocks)
    with code.loop(i64(0), code.sdiv(num_inputs, i64(GROUP)), 1, [floats(0.0)] * number) as totals:
        heads = [code.at(block, code.mul(totals[0], i64(GROUP_BYTES))) for block in blocks]
        inputs = [code.at(row, code.mul(totals[0], i64(GROUP)), F32) for row in rows]
        found = _sums_of_codes(code, [code.at(head, i64(HEAD_BYTES)) for head in heads], inputs)
        all_inputs = [_sum_of_inputs(code, row) for row in inputs]
        for block, head in enumerate(heads):
            word = code.read(head, I32S)
            scales = code.bitcast(code.and_(word, _words(~ZERO_BITS)), F32S)
            zeros = code.sitofp(code.sub(_words(_MIDDLE), code.and_(word, _words(ZERO_BITS))), F32S)
            for row, total in enumerate(all_inputs):
                at = row * len(blocks) + block
                value = code.fused(zeros, total, found[at])
                totals[1 + at] = code.fused(scales, value, totals[1 + at])
    return totals[1:]


def _sums_of_codes(code: Code, blocks: list[Value], rows: list[Value]) -> list[Value]:
    """The sums of inputs times codes in one group; see `_codes`."""
    number = len(rows) * len(blocks)
    with code.loop(i64(0), i64(GROUP), INPUTS_OF_WORD, [floats(0.0)] * number) as values:
        # Eight inputs are half a vector of 16 words of 32 bits: 64 bytes.
        words = [code.read(block, I32S, code.mul(values[0], i64(LANES // INPUTS_OF_WORD))) for block in blocks]
        for place in range(INPUTS_OF_WORD):
            index = code.add(values[0], i64(place))
            x = [code.splat(code.read(row, F32, index)) for row in rows]
            for block, word in enumerate(words):
                weights = _codes(code, word, place)
                for row, one in enumerate(x):
                    at = 1 + row * len(blocks) + block
                    values[at] = code.fused(weights, one, values[at])
    return values[1:]


def _codes(code: Code, words: Value, place: int) -> Value:
    """The codes of one input, less 8, as numbers; the look-up reads the lowest four bits of each lane."""
    shifted = code.lshr(words, _words(_CODE_BITS * place)) if place else words
    table = ir.Constant(F32S, [f32(float(number - _MIDDLE)) for number in range(LANES)])
    return code.intrinsic("llvm.x86.avx512.permvar.sf.512", F32S, table, shifted)


def _sum_of_inputs(code: Code, row: Value) -> Value:
    """The sum of a row's inputs in one group, in all lanes."""
    total = code.read(row, F32S)
    for first in range(LANES, GROUP, LANES):
        total = code.fadd(total, code.read(row, F32S, i64(first)))
    return code.splat(code.halves(total, code.fadd))
