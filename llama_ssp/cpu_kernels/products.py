"""Products of a few rows with packed weights: each thread computes all rows of some outputs, and reads a weight once.

    kind      weights                   rows                  sums
    singles   fp32, one scale           fp32                  fp32, one input after the other
    halves    fp16, one scale           fp32                  fp32, one input after the other
    bytes     int8, a scale an output   fp32                  fp32, one input after the other
    dots      int8, a scale an output   int8, a scale a row   integers
    nibbles   4 bits (`nibbles`)        fp32                  fp32, group by group, one input after the other

Weights lie in blocks of 16 outputs, so that a vector is one input (four inputs of `dots`) of all outputs of a block and
no sum crosses lanes. The sum of an output of a row therefore takes the same steps whatever the other rows are.

    dots      block 0: | output 0: inputs 0-3 | output 1: inputs 0-3 | ...  | output 0: inputs 4-7 | ...
    others    block 0: | input 0: 16 outputs | input 1: 16 outputs | ...    block 1: ...

What surrounds a product is done with it: before it the RMS norm of the rows, after it bias and residual, or the gate of
the MLP, whose gate and up blocks alternate.

Shapes: M rows, I inputs, O outputs.
"""

from collections.abc import Sequence

from llvmlite import ir

from llama_ssp.cpu_kernels import nibbles
from llama_ssp.cpu_kernels.emit import (
    F32,
    F32S,
    I8,
    I32,
    I32S,
    I64,
    LANES,
    POINTER,
    VOID,
    Code,
    Value,
    floats,
    i64,
)  # fmt: skip

FEATURES: dict[str, tuple[str, ...]] = {
    "singles": (), "halves": ("f16c",), "bytes": (), "dots": ("avx512vnni",), "nibbles": ("avx512f",),
}  # fmt: skip
"""Instructions that each kind needs."""
VALUE_BYTES = {"singles": 4, "halves": 2, "bytes": 1, "dots": 1}
ROW_BYTES = {"singles": 4, "halves": 4, "bytes": 4, "dots": 1, "nibbles": 4}
_ONE_SCALE = {"singles", "halves", "nibbles"}
INPUTS = 16
"""Inputs of a layer are a multiple of it."""
MOST_ROWS = 6
"""Rows whose sums stay in registers; more are cut."""
_BLOCKS = {1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4}
"""Blocks whose sums stay in registers beside so many rows: 8 are needed to hide the latency of one sum."""
_UNROLLED = 2
_CHUNK = 8
"""Blocks that meet all rows before the next ones are read."""
_LEAST_LOG, _MOST_LOG = -87.0, 88.0
SIGN_BIT = 128

# What the threads of one product share, by its place in an array of words.
CONTEXT = ("weights", "rows", "y", "scales", "bias", "residual", "row_scales", "row_sums", "num_rows", "num_inputs",
            "num_outputs", "gates")  # fmt: skip
_NUMBERS = {"num_rows", "num_inputs", "num_outputs", "gates"}


def part_of(module: ir.Module, kind: str) -> Value:
    """The function that a thread runs for its part of the outputs: (first unit, last unit, context)."""
    tiles = {
        (rows, blocks): _tile(module, kind, rows, blocks)
        for rows in range(1, MOST_ROWS + 1)
        for blocks in sorted({1, 2, _BLOCKS[rows]})
    }
    return _part(module, kind, tiles, _finish(module, kind))


def function(module: ir.Module, name: str, kinds: Sequence[Value]) -> tuple[Code, Sequence[Value]]:
    """Begin a function; returns its code and its arguments."""
    function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
    function.linkage = "internal"
    return Code(function), function.args


def _tile(module: ir.Module, kind: str, num_rows: int, num_blocks: int) -> Value:
    """Sum over all inputs, for some rows and blocks; the sums leave the registers at the end, rows first."""
    code, (weights, rows, num_inputs, sums) = function(
        module, f"tile_{num_rows}_{num_blocks}", [POINTER, POINTER, I64, POINTER]
    )
    code.function.attributes.add("noinline")
    block_bytes = _block_bytes(code, kind, num_inputs)
    blocks = [code.at(weights, code.mul(block_bytes, i64(number))) for number in range(num_blocks)]
    starts = [code.at(rows, code.mul(num_inputs, i64(row * ROW_BYTES[kind]))) for row in range(num_rows)]
    found = (
        nibbles.sums(code, blocks, starts, num_inputs)
        if kind == "nibbles"
        else _sums(code, kind, blocks, starts, num_inputs)
    )
    for number, value in enumerate(found):
        code.write(value, sums, i64(number * LANES))
    code.ret_void()
    return code.function


def _block_bytes(code: Code, kind: str, num_inputs: Value) -> Value:
    """Bytes of the weights of 16 outputs."""
    if kind == "nibbles":
        return nibbles.block_bytes(code, num_inputs)
    return code.mul(num_inputs, i64(LANES * VALUE_BYTES[kind]))


def _sums(code: Code, kind: str, blocks: list[Value], starts: list[Value], num_inputs: Value) -> list[Value]:
    """Sum over all inputs; returns the vectors, rows first."""
    num_rows, num_blocks = len(starts), len(blocks)
    zero = ir.Constant(I32S, [0] * LANES) if kind == "dots" else floats(0.0)
    taken = 4 if kind == "dots" else 1
    with code.loop(i64(0), num_inputs, taken * _UNROLLED, [zero] * (num_rows * num_blocks)) as values:
        for step in range(_UNROLLED):
            index = code.add(values[0], i64(step * taken))
            inputs = [
                code.splat(code.read(code.at(start, code.mul(index, i64(ROW_BYTES[kind]))), I32 if taken > 1 else F32))
                for start in starts
            ]
            place = code.mul(index, i64(LANES * VALUE_BYTES[kind]))
            for block_number, block in enumerate(blocks):
                read = _weights(code, kind, code.at(block, place))
                for row, x in enumerate(inputs):
                    at = 1 + row * num_blocks + block_number
                    values[at] = (
                        code.intrinsic("llvm.x86.avx512.vpdpbusd.512", I32S, values[at], read, x)
                        if kind == "dots"
                        else code.fused(read, x, values[at])
                    )
    return values[1:]


def _weights(code: Code, kind: str, place: Value) -> Value:
    """Read a vector of weights, and widen it; those of `dots` are bytes without sign, each 128 too large."""
    if kind == "dots":
        return code.read(place, I32S)
    if kind == "singles":
        return code.read(place, F32S)
    if kind == "halves":
        return code.fpext(code.read(place, ir.VectorType(ir.HalfType(), LANES)), F32S)
    return code.sitofp(code.sext(code.read(place, ir.VectorType(I8, LANES)), I32S), F32S)


def _finish(module: ir.Module, kind: str) -> Value:
    """Scale the sums of a tile; then the gate, or bias and residual; and store them."""
    code, (words, sums, row, block, num_rows, num_blocks) = function(
        module, "finish", [POINTER, POINTER, I64, I64, I64, I64]
    )
    given = _given(code, words)
    width = code.sdiv(given["num_outputs"], code.add(given["gates"], i64(1)))
    with code.loop(i64(0), num_rows, 1) as (here,):
        this_row = code.add(row, here)
        start = code.mul(code.mul(here, num_blocks), i64(LANES))
        line = code.mul(this_row, width)

        def scaled(number: Value) -> Value:
            value = code.read(sums, I32S if kind == "dots" else F32S, code.add(start, code.mul(number, i64(LANES))))
            if kind == "dots":
                too_much = code.mul(code.read(given["row_sums"], I32, this_row), ir.Constant(I32, SIGN_BIT))
                value = code.sitofp(code.sub(value, code.splat(too_much)), F32S)
                value = code.fmul(value, code.splat(code.read(given["row_scales"], F32, this_row)))
            if kind in _ONE_SCALE:
                return code.fmul(value, code.splat(code.read(given["scales"], F32)))
            outputs = code.mul(code.add(block, number), i64(LANES))
            return code.fmul(value, code.read(given["scales"], F32S, outputs))

        with code.if_else(code.icmp_unsigned("==", given["gates"], i64(0))) as (is_plain, is_gated):
            with is_plain, code.loop(i64(0), num_blocks, 1) as (number,):
                output = code.mul(code.add(block, number), i64(LANES))
                place = code.add(line, output)
                value = _plus(code, scaled(number), given["bias"], output)
                code.write(_plus(code, value, given["residual"], place), given["y"], place)
            with is_gated, code.loop(i64(0), num_blocks, 2) as (number,):
                place = code.add(line, code.mul(code.sdiv(code.add(block, number), i64(2)), i64(LANES)))
                gate, up = scaled(number), scaled(code.add(number, i64(1)))
                silu = code.fdiv(gate, code.fadd(floats(1.0), exponential(code, code.fneg(gate))))
                code.write(code.fmul(silu, up), given["y"], place)
    code.ret_void()
    return code.function


def _given(code: Code, words: Value) -> dict[str, Value]:
    """Read the context."""
    places = {name: code.at(words, i64(place), I64) for place, name in enumerate(CONTEXT)}
    return {name: code.load(place, typ=I64 if name in _NUMBERS else POINTER) for name, place in places.items()}


def _plus(code: Code, value: Value, added: Value, index: Value) -> Value:
    """Add a vector, if there is one."""
    before = code.block
    with code.if_then(code.icmp_unsigned("!=", code.ptrtoint(added, I64), i64(0))):
        more = code.fadd(value, code.read(added, F32S, index))
        inside = code.block
    total = code.phi(F32S)
    total.add_incoming(value, before)
    total.add_incoming(more, inside)
    return total


def exponential(code: Code, x: Value) -> Value:
    """e^x to the last bit or two; the ends of its range stand for what is beyond.

    Source: the polynomial of expf in Cephes.
    """
    x = code.intrinsic("llvm.maxnum.v16f32", F32S, x, floats(_LEAST_LOG))
    x = code.intrinsic("llvm.minnum.v16f32", F32S, x, floats(_MOST_LOG))
    whole = code.intrinsic("llvm.nearbyint.v16f32", F32S, code.fmul(x, floats(1.44269504)))
    rest = code.fused(whole, floats(-0.693359375), x)
    rest = code.fused(whole, floats(2.12194440e-4), rest)
    value = floats(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = code.fused(value, rest, floats(factor))
    value = code.fadd(code.fused(value, code.fmul(rest, rest), rest), floats(1.0))
    exponent = code.add(code.fptosi(whole, I32S), ir.Constant(I32S, [127] * LANES))
    return code.fmul(value, code.bitcast(code.shl(exponent, ir.Constant(I32S, [23] * LANES)), F32S))


def _part(module: ir.Module, kind: str, tiles: dict[tuple[int, int], Value], finish: Value) -> Value:
    """What one thread does: all rows of the units from `begin` to `end`; a unit is a block, or gate and up."""
    code, (begin, end, words) = function(module, "part", [I64, I64, POINTER])
    given = _given(code, words)
    sums = code.slot(F32, LANES * max(rows * blocks for rows, blocks in tiles))
    unit = code.add(given["gates"], i64(1))
    first, last = code.mul(begin, unit), code.mul(end, unit)
    block_bytes = _block_bytes(code, kind, given["num_inputs"])

    def call(row: Value, num_rows: int, block: Value, num_blocks: int) -> None:
        weights = code.at(given["weights"], code.mul(block, block_bytes))
        rows = code.at(given["rows"], code.mul(code.mul(row, given["num_inputs"]), i64(ROW_BYTES[kind])))
        code.call(tiles[num_rows, num_blocks], [weights, rows, given["num_inputs"], sums])
        code.call(finish, [words, sums, row, block, i64(num_rows), i64(num_blocks)])

    def all_blocks(row: Value, num_rows: int) -> None:
        start = chunk
        for num_blocks in sorted({1, 2, _BLOCKS[num_rows]}, reverse=True):
            rest = code.sub(chunk_end, start)
            stop = code.add(start, code.sub(rest, code.srem(rest, i64(num_blocks))))
            with code.loop(start, stop, num_blocks) as (block,):
                call(row, num_rows, block, num_blocks)
            start = stop

    total = given["num_rows"]
    whole = code.sub(total, code.srem(total, i64(MOST_ROWS)))
    left = code.sub(total, whole)
    with code.loop(first, last, _CHUNK) as (chunk,):
        beyond = code.add(chunk, i64(_CHUNK))
        chunk_end = code.select(code.icmp_signed("<", beyond, last), beyond, last)
        with code.loop(i64(0), whole, MOST_ROWS) as (row,):
            all_blocks(row, MOST_ROWS)
        for num_rows in range(1, MOST_ROWS):
            with code.if_then(code.icmp_unsigned("==", left, i64(num_rows))):
                all_blocks(whole, num_rows)
    code.ret_void()
    return code.function
