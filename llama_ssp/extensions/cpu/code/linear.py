"""Products of a few rows with packed weights: each thread computes all rows of some outputs, and reads a weight once.

    kind      weights                   rows                  sums
    singles   fp32, one scale           fp32                  fp32, one input after the other
    halves    fp16, one scale           fp32                  fp32, one input after the other
    bytes     int8, a scale an output   fp32                  fp32, one input after the other
    dots      int8, a scale an output   int8, a scale a row   integers
    fp8       E4M3, groups of 128       fp32                  fp32, group by group, one input after the other
    nibbles   4 bits, groups            fp32                  fp32, group by group, one input after the other
    mxfp4     E2M1, groups of 32        fp32                  fp32, group by group, one input after the other
    nvfp4     E2M1, groups of 16        fp32                  fp32, group by group, one input after the other

Weights lie in blocks of 16 outputs, so that a vector is one input (four inputs of `dots`) of all outputs of a block and
no sum crosses lanes. The sum of an output of a row therefore takes the same steps whatever the other rows are.

    dots      block 0: | output 0: inputs 0-3 | output 1: inputs 0-3 | ...  | output 0: inputs 4-7 | ...
    others    block 0: | input 0: 16 outputs | input 1: 16 outputs | ...    block 1: ...

A product includes the operations around it: before it the RMS norm of the rows, after it bias and residual, or the
gate of the MLP, whose gate and up blocks alternate.

A block has as many groups as the second dimension of the weights. Of `nibbles`, whose groups have 32 inputs or a
multiple, a word of 32 bits holds eight inputs of an output, the first in its lowest bits, and a vector the words of a
block's outputs. The codes of a group are multiplied as numbers from -8 to 7, and the rest of the zero is subtracted
from their sum, once; most zeros are near 8, so little is lost:

    block | group | group | ...
    group | 16 words of `byte_rows`, a scale and a zero each | inputs 0-7: 16 words | inputs 8-15: 16 words | ...

Of `fp8` the words are scales, and the 16 outputs of each input follow. `from_e4m3` makes numbers 2^-8 times as large,
and the scales make up for it. Of `mxfp4` and `nvfp4` the words are bytes, scales in E8M0 and E4M3, and an output has a
scale as well.

Rows are normed and quantized before the product: a few rows by the calling thread, more by all threads. Torch
allocates the memory.

Shapes: M rows, I inputs, O outputs.
"""

from collections.abc import Sequence

from llvmlite import ir

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.code.emit import (
    F32,
    F32S,
    I8S,
    I32,
    I32S,
    I64,
    NO_POINTER,
    POINTER,
    Code,
    Operator,
    Value,
    constant,
)
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.code.kinds import BYTES, DOTS, E2M1, E4M3, E4M3_DTYPE, NIBBLES, SIGN_BIT
from llama_ssp.extensions.cpu.code.kinds import HALVES as FP16
from llama_ssp.extensions.cpu.code.kinds import SINGLES as FP32
from llama_ssp.storage.formats import FP4_NUMBERS, INT4_ZERO_BITS, WORD_BYTES, Product

_VALUE_BITS = {FP32: 32, FP16: 16, BYTES: 8, DOTS: 8, E4M3: 8, NIBBLES: 4, E2M1: 4}
_DTYPES = {FP32: None, FP16: "float16", BYTES: "int8", E4M3: E4M3_DTYPE}
_ONE_SCALE = {FP32, FP16, E4M3, NIBBLES}
_BLOCKS = {1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4}
"""Blocks whose sums stay in registers, by number of rows; more rows are divided. 8 accumulators hide one's latency."""
_FEW_BLOCKS = {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
"""The same numbers where a block's sums take two of 16 registers (AVX2), or four of 32 (NEON)."""
_UNROLLED = 2
_LINE_BYTES = 64
_CHUNK = 8
"""Number of blocks that are multiplied with all rows before the next ones are read."""

CONTEXT = dict.fromkeys(("weights", "rows", "y", "scales", "bias", "residual", "row_scales", "row_sums"), POINTER)
CONTEXT |= dict.fromkeys(("num_rows", "num_inputs", "num_outputs", "num_groups", "gates"), I64)
"""Words that the threads of one product share."""
_UNPREPARED = dict.fromkeys(("x", "space", "norm"), POINTER)
_UNPREPARED |= dict.fromkeys(("least_square", "num_rows", "num_inputs"), I64)
"""Words that the threads share which norm and quantize its rows."""
SERIAL = 2**16
"""The most multiplications, and weights that are read, for which one more thread does not pay."""
_INPUTS_OF_WORD = 8
_CODE_BITS, _MIDDLE = 4, 8
_NUMBERS = {NIBBLES: [code - _MIDDLE for code in range(LANES)], E2M1: FP4_NUMBERS}
"""The number of each code, by kind of 4-bit codes."""


def emit(product: Product) -> ir.Module:
    """The operator of a product, with everything it calls; its entry is `product`."""
    module = ir.Module(name=f"product of {product.kind}")
    tiles = {
        (rows, blocks): _tile(module, product, rows, blocks)
        for rows in _blocks_by_rows()
        for blocks in _numbers_of_blocks(product, rows)
    }
    part = _part(module, product, tiles, _finish(module, product))
    part.linkage = "external"  # `layer` calls it too
    _entry(module, product, _preparation(module, product), part)
    return module


def _entry(module: ir.Module, product: Product, preparation: Value, part: Value) -> None:
    """The operator, as torch calls it: (x, weights, scales, bias, residual, norm, least_square, gates) -> y."""
    operator = Operator(module, "product", num_tensors=6)
    code = operator.code
    x, weights, scales, bias, residual, norm = operator.tensors
    gates = code.and_(operator.argument(7), 1)
    num_rows, num_inputs = operator.size(x, 0), operator.size(x, 1)
    num_outputs = code.mul(operator.size(weights, 0), LANES)
    y = operator.empty(num_rows, code.sdiv(num_outputs, code.add(gates, 1)))
    # Space for normed rows, and for quantized ones with their scales and sums.
    space = operator.empty(code.mul(num_rows, code.add(code.mul(num_inputs, 2), 2)))
    given = {
        "x": operator.pointer(x),
        "space": operator.pointer(space),
        "norm": operator.pointer_or_none(norm),
        "least_square": operator.argument(6),
        "num_rows": num_rows,
        "num_inputs": num_inputs,
    }
    grain = code.add(code.sdiv(SERIAL, num_inputs), 1)
    operator.share(num_rows, grain, preparation, code.stored(_UNPREPARED, given))
    rows = prepared(code, product, given, 0, 0)
    words = code.stored(
        CONTEXT,
        rows
        | {
            "weights": operator.pointer(weights),
            "y": operator.pointer(y),
            "scales": operator.pointer(scales),
            "bias": operator.pointer_or_none(bias),
            "residual": operator.pointer_or_none(residual),
            "num_outputs": num_outputs,
            "num_groups": operator.size(weights, 1),
            "gates": gates,
        },
    )
    num_units = code.sdiv(num_outputs, code.mul(code.add(gates, 1), LANES))
    cost = code.mul(code.mul(num_inputs, LANES), code.add(num_rows, 1))
    operator.share(num_units, code.add(code.sdiv(SERIAL, cost), 1), part, words)
    operator.give(y)


def _preparation(module: ir.Module, product: Product) -> Value:
    """Prepare the rows from `begin` to `end`."""
    code, (begin, end, words) = Code.begin(module, "preparation", [I64, I64, POINTER])
    prepared(code, product, code.loaded(_UNPREPARED, words), begin, end)
    return code.end()


def prepared(code: Code, product: Product, given: dict[str, Value], begin: Value, end: Value) -> dict[str, Value]:
    """Write the rows from `begin` to `end` as a product of this kind takes them; all rows, by their names in CONTEXT.

    `given` is named in _UNPREPARED. Where there is a norm, normed rows are written into the space; rows of `dots` are
    rounded into the second half of the space.
    """
    num_rows, num_inputs, space = given["num_rows"], given["num_inputs"], given["space"]
    has_norm = code.is_there(given["norm"])
    with code.if_then(has_norm), code.loop(begin, end, 1) as (row,):
        start = code.mul(row, num_inputs)
        _normalize(code, code.at(given["x"], start, F32), code.at(space, start, F32), given)
    x = rows = code.select(has_norm, space, given["x"])
    scales = sums = NO_POINTER
    if product.codes == DOTS:
        number = code.mul(num_rows, num_inputs)
        rows = code.at(space, number, F32)
        scales = code.at(rows, number)
        sums = code.at(scales, num_rows, F32)
        with code.loop(begin, end, 1) as (row,):
            start = code.mul(row, num_inputs)
            scale, total = _round_row(code, code.at(x, start, F32), code.at(rows, start), num_inputs)
            code.write(scale, scales, row)
            code.write(total, sums, row)
    return {"rows": rows, "row_scales": scales, "row_sums": sums, "num_rows": num_rows, "num_inputs": num_inputs}


def _normalize(code: Code, x: Value, into: Value, given: dict[str, Value]) -> None:
    """Write x * norm / sqrt(sum of the squares of x + least square)."""
    num_inputs, least_square = given["num_inputs"], code.bitcast(given["least_square"], ir.DoubleType())
    with code.loop(0, num_inputs, LANES, [constant(F32S, 0.0)]) as values:
        part = code.read(x, F32S, values[0])
        values[1] = code.fused(part, part, values[1])
    total = code.fadd(code.halves(values[1], code.fadd), code.fptrunc(least_square, F32))
    factor = code.splat(code.fdiv(1.0, code.intrinsic("llvm.sqrt.f32", F32, total)))
    with code.loop(0, num_inputs, LANES) as (index,):
        scaled = code.fmul(code.read(x, F32S, index), factor)
        code.write(code.fmul(scaled, code.read(given["norm"], F32S, index)), into, index)


def _round_row(code: Code, x: Value, into: Value, num_inputs: Value) -> tuple[Value, Value]:
    """Round a row to 127 steps on each side of zero; returns its scale and the sum of its steps."""
    scale, factor = code.scales_of(x, num_inputs, 127.0)
    with code.loop(0, num_inputs, LANES, [constant(I32S, 0)]) as values:
        steps = code.intrinsic("llvm.nearbyint.v16f32", F32S, code.fmul(code.read(x, F32S, values[0]), factor))
        whole = code.fptosi(steps, I32S)
        code.write(code.trunc(whole, I8S), into, values[0])
        values[1] = code.add(values[1], whole)
    return scale, code.halves(values[1], code.add)


def _blocks_by_rows() -> dict[int, int]:
    """The most blocks of a tile, by its number of rows, on this CPU."""
    return _BLOCKS if has_features(("avx512f",)) else _FEW_BLOCKS


def _numbers_of_blocks(product: Product, num_rows: int) -> list[int]:
    """Numbers of blocks of outputs that a tile may have, the most first."""
    most = _blocks_by_rows()[num_rows]
    # The sums of 6 rows and 4 blocks, with a group's, do not fit into registers, which halves FP8's speed.
    if product.codes == E4M3 and num_rows == max(_BLOCKS):
        most = min(most, 2)
    return sorted({1, min(2, most), most}, reverse=True)


def _tile(module: ir.Module, product: Product, num_rows: int, num_blocks: int) -> Value:
    """Sum over all inputs, for some rows and blocks; the sums leave the registers at the end, a chunk's a row."""
    code, (weights, rows, num_inputs, num_groups, sums) = Code.begin(
        module, f"tile_{num_rows}_{num_blocks}", [POINTER, POINTER, I64, I64, POINTER]
    )
    code.function.attributes.add("noinline")
    block_bytes = _block_bytes(code, product, num_inputs, num_groups)
    blocks = [code.at(weights, code.mul(block_bytes, number)) for number in range(num_blocks)]
    starts = [code.at(rows, code.mul(num_inputs, row * _row_bytes(product))) for row in range(num_rows)]
    # A core that reads few blocks at once waits for memory, unless it asks early for the next tile's.
    ahead = None if _blocks_by_rows() is _BLOCKS else code.mul(block_bytes, num_blocks)
    if product.group:
        found = _sums_of_groups(code, product, blocks, starts, (num_inputs, num_groups), ahead=ahead)
    else:
        found = _sums(code, product, blocks, starts, num_inputs, ahead=ahead)
    for at, value in enumerate(found):
        row, number = divmod(at, num_blocks)
        code.write(value, sums, (row * _CHUNK + number) * LANES)
    return code.end()


def _block_bytes(code: Code, product: Product, num_inputs: Value, num_groups: Value) -> Value:
    """Bytes of the weights of 16 outputs."""
    heads = code.mul(num_groups, _head_bytes(product))
    return code.add(heads, code.mul(num_inputs, _input_bytes(product)))


def _head_bytes(product: Product) -> int:
    """Bytes of the words of 16 outputs, in a group."""
    return LANES * (1 if product.codes == E2M1 else WORD_BYTES) if product.group else 0


def _input_bytes(product: Product) -> int:
    """Bytes of the weights of one input, and 16 outputs."""
    return LANES * _VALUE_BITS[product.codes] // 8


def _row_bytes(product: Product) -> int:
    """Bytes of an input of a row."""
    return 1 if product.codes == DOTS else 4


def _sums(
    code: Code, product: Product, blocks: list[Value], starts: list[Value], num_inputs: Value, *, ahead: Value
) -> list[Value]:
    """Sum over all inputs; returns the vectors, rows first. `ahead` is the distance in bytes to what is read next."""
    is_dots, in_words = product.codes == DOTS, product.codes in _NUMBERS
    taken, steps = (4 if is_dots else 1), (_INPUTS_OF_WORD if in_words else _UNROLLED)
    zero, kind = (constant(I32S, 0), I32) if is_dots else (constant(F32S, 0.0), F32)
    with code.loop(0, num_inputs, taken * steps, [zero] * (len(starts) * len(blocks))) as values:
        # Eight inputs in 4 bits are half a vector of 16 words of 32 bits: 64 bytes.
        first = code.mul(values[0], LANES // _INPUTS_OF_WORD)
        words = [code.read(block, I32S, first) for block in blocks if in_words]
        for step in range(steps):
            index = code.add(values[0], step * taken)
            offset, place = (code.mul(index, size) for size in (_row_bytes(product), _input_bytes(product)))
            inputs = [code.splat(code.read(code.at(start, offset), kind)) for start in starts]
            for number, block in enumerate(blocks):
                if ahead is not None and step * _input_bytes(product) % _LINE_BYTES == 0:
                    code.prefetch(code.at(code.at(block, place), ahead))
                if in_words:
                    weights = _codes(code, words[number], step, _NUMBERS[product.codes])
                elif is_dots:  # bytes without sign, each 128 too large
                    weights = code.read(code.at(block, place), I32S)
                else:
                    weights = code.widened(_DTYPES[product.codes], code.at(block, place))
                for row, x in enumerate(inputs):
                    at = 1 + row * len(blocks) + number
                    values[at] = (
                        code.intrinsic("llvm.x86.avx512.vpdpbusd.512", I32S, values[at], weights, x)
                        if is_dots
                        else code.fused(weights, x, values[at])
                    )
    return values[1:]


def _finish(module: ir.Module, product: Product) -> Value:
    """Scale the sums of some rows of a chunk; then the gate, or bias and residual; and store them."""
    code, (words, sums, row, block, num_rows, num_blocks) = Code.begin(
        module, "finish", [POINTER, POINTER, I64, I64, I64, I64]
    )
    given = code.loaded(CONTEXT, words)
    width = code.sdiv(given["num_outputs"], code.add(given["gates"], 1))
    with code.loop(0, num_rows, 1) as (here,):
        this_row = code.add(row, here)
        start = code.mul(here, _CHUNK * LANES)
        line = code.mul(this_row, width)

        def scaled(number: Value) -> Value:
            value = code.read(sums, I32S if product.codes == DOTS else F32S, code.add(start, code.mul(number, LANES)))
            if product.codes == DOTS:
                too_much = code.mul(code.read(given["row_sums"], I32, this_row), SIGN_BIT)
                value = code.sitofp(code.sub(value, code.splat(too_much)), F32S)
                value = code.fmul(value, code.splat(code.read(given["row_scales"], F32, this_row)))
            if product.codes in _ONE_SCALE:
                return code.fmul(value, code.splat(code.read(given["scales"], F32)))
            outputs = code.mul(code.add(block, number), LANES)
            return code.fmul(value, code.read(given["scales"], F32S, outputs))

        with code.if_else(code.icmp_unsigned("==", given["gates"], 0)) as (is_plain, is_gated):
            with is_plain, code.loop(0, num_blocks, 1) as (number,):
                output = code.mul(code.add(block, number), LANES)
                place = code.add(line, output)
                value = _plus(code, scaled(number), given["bias"], output)
                code.write(_plus(code, value, given["residual"], place), given["y"], place)
            with is_gated, code.loop(0, num_blocks, 2) as (number,):
                place = code.add(line, code.mul(code.sdiv(code.add(block, number), 2), LANES))
                gate, up = scaled(number), scaled(code.add(number, 1))
                silu = code.fdiv(gate, code.fadd(1.0, code.exponential(code.fneg(gate))))
                code.write(code.fmul(silu, up), given["y"], place)
    return code.end()


def _plus(code: Code, value: Value, added: Value, index: Value) -> Value:
    """Add the vector at an address, if there is one."""
    before = code.block
    with code.if_then(code.is_there(added)):
        more = code.fadd(value, code.read(added, F32S, index))
        inside = code.block
    total = code.phi(F32S)
    total.add_incoming(value, before)
    total.add_incoming(more, inside)
    return total


def _part(module: ir.Module, product: Product, tiles: dict[tuple[int, int], Value], finish: Value) -> Value:
    """The part of one thread: all rows of the units from `begin` to `end`; a unit is a block, or gate and up."""
    code, (begin, end, words) = Code.begin(module, "part", [I64, I64, POINTER])
    given = code.loaded(CONTEXT, words)
    sums = code.slot(F32, LANES * _CHUNK * max(_blocks_by_rows()))
    unit = code.add(given["gates"], 1)
    first, last = code.mul(begin, unit), code.mul(end, unit)
    block_bytes = _block_bytes(code, product, given["num_inputs"], given["num_groups"])

    def all_blocks(row: Value, num_rows: int) -> None:
        start = chunk
        rows = code.at(given["rows"], code.mul(code.mul(row, given["num_inputs"]), _row_bytes(product)))
        for num_blocks in _numbers_of_blocks(product, num_rows):
            rest = code.sub(chunk_end, start)
            stop = code.add(start, code.sub(rest, code.srem(rest, num_blocks)))
            with code.loop(start, stop, num_blocks) as (block,):
                weights = code.at(given["weights"], code.mul(block, block_bytes))
                into = code.at(sums, code.mul(code.sub(block, chunk), LANES), F32)
                code.call(tiles[num_rows, num_blocks], [weights, rows, given["num_inputs"], given["num_groups"], into])
            start = stop
        code.call(finish, [words, sums, row, chunk, num_rows, code.sub(chunk_end, chunk)])

    total, most_rows = given["num_rows"], max(_blocks_by_rows())
    whole = code.sub(total, code.srem(total, most_rows))
    left = code.sub(total, whole)
    with code.loop(first, last, _CHUNK) as (chunk,):
        chunk_end = code.smaller(code.add(chunk, _CHUNK), last)
        with code.loop(0, whole, most_rows) as (row,):
            all_blocks(row, most_rows)
        for num_rows in range(1, most_rows):
            with code.if_then(code.icmp_unsigned("==", left, num_rows)):
                all_blocks(whole, num_rows)
    return code.end()


def _sums_of_groups(
    code: Code, product: Product, blocks: list[Value], rows: list[Value], sizes: tuple[Value, Value], *, ahead: Value
) -> list[Value]:
    """Sum over all inputs, group by group; returns the vectors, rows first. `sizes` are inputs and groups."""
    num_inputs, num_groups = sizes
    group = code.sdiv(num_inputs, num_groups)
    group_bytes = code.add(code.mul(group, _input_bytes(product)), _head_bytes(product))
    with code.loop(0, num_groups, 1, [constant(F32S, 0.0)] * (len(rows) * len(blocks))) as totals:
        heads = [code.at(block, code.mul(totals[0], group_bytes)) for block in blocks]
        inputs = [code.at(row, code.mul(totals[0], group), F32) for row in rows]
        found = _sums(
            code, product, [code.at(head, _head_bytes(product)) for head in heads], inputs, group, ahead=ahead
        )
        has_zeros, scales = product.codes == NIBBLES, [_scales(code, product, head) for head in heads]
        zeros = [_zeros(code, head) for head in heads if has_zeros]
        all_inputs = [_sum_of_inputs(code, group, row) for row in inputs if has_zeros]
        for at, value in enumerate(found):
            row, block = divmod(at, len(blocks))
            shifted = code.fused(zeros[block], all_inputs[row], value) if has_zeros else value
            totals[1 + at] = code.fused(scales[block], shifted, totals[1 + at])
    return totals[1:]


def _scales(code: Code, product: Product, head: Value) -> Value:
    """The scales of 16 outputs: fp32, whose lowest bits are the zeros of `nibbles`; an exponent's bits; or E4M3."""
    if product.codes == E4M3:
        return code.read(head, F32S)
    if product.codes == NIBBLES:
        return code.bitcast(code.and_(code.read(head, I32S), ~INT4_ZERO_BITS), F32S)
    if product.scale_dtype == E4M3_DTYPE:
        return code.from_e4m3(code.read(head, I8S))
    return code.bitcast(code.shl(code.zext(code.read(head, I8S), I32S), 23), F32S)


def _zeros(code: Code, head: Value) -> Value:
    """The term added for each input, once for a group: the middle less the zeros of 16 outputs."""
    return code.sitofp(code.sub(_MIDDLE, code.and_(code.read(head, I32S), INT4_ZERO_BITS)), F32S)


def _codes(code: Code, words: Value, place: int, numbers: Sequence[float]) -> Value:
    """The numbers of the codes of one input; the look-up reads the lowest four bits of each lane."""
    shifted = code.lshr(words, _CODE_BITS * place) if place else words
    table = ir.Constant(F32S, [float(number) for number in numbers])
    return code.intrinsic("llvm.x86.avx512.permvar.sf.512", F32S, table, shifted)


def _sum_of_inputs(code: Code, group: Value, row: Value) -> Value:
    """The sum of a row's inputs in one group, in all lanes."""
    with code.loop(0, group, LANES, [constant(F32S, 0.0)]) as values:
        values[1] = code.fadd(values[1], code.read(row, F32S, values[0]))
    return code.splat(code.halves(values[1], code.fadd))
