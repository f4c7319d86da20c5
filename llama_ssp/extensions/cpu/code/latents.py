"""Attention to latents as torch calls it: 16 latents at a time are laid out for all queries of a unit, and read again.

    unit    some queries of a row: with few queries as many as keep all threads busy, else 48

For a unit, latents are read in chunks of 128 slots, from slot 0 on; chunks that no query of the unit sees are skipped.
In a chunk, 16 latents at a time are transposed with their rotary keys, so that a vector is one dimension of 16 slots
and no sum crosses lanes. Then scores are turned into exponentials relative to the largest score so far, and the latents
are read again, as values, one slot after the other. So a query's sums take the same steps whatever else is computed.

Rows are in the cache as its format has them (`parts.KeptRows`), and are widened in registers. Scales are multiplied
into what is laid out, and into the weights of values.

Shapes: B rows, H heads, T positions, Q = H * T queries of a row, S slots, R numbers of a latent, P of a rotary key,
D = R + P.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.code.attention import LOWEST, row_scale, tiles, transposed
from llama_ssp.extensions.cpu.code.emit import F32, F32S, I32, I64, POINTER, Code, Operator, Value, constant
from llama_ssp.storage.formats import CACHES, CacheFormat

CONTEXT = dict.fromkeys(("queries", "latents", "rotary", "mask", "out"), POINTER)
CONTEXT |= dict.fromkeys(("num_queries", "num_positions", "num_slots", "mask_slots", "row_bytes", "slot_bytes"), I64)
CONTEXT |= dict.fromkeys(("unit", "scale"), I64)
"""Words that the threads share."""
_TILE, _QUERIES, _CHUNK = 6, 48, 128
"""Queries whose sums registers hold together, queries of a unit, and slots of a chunk."""
_DIMS = 256
"""Dimensions of 16 keys that the nearest cache holds beside queries."""
_MOST, _FACTOR, _STATE = LANES, LANES + 1, 2 * LANES
"""State of a query between chunks: sums of exponentials, the largest score, the last change of scale."""
_SIZES = (1, 2, _TILE)
"""Numbers of queries that have a function."""


def emit(kind: str, rank: int, rotary: int) -> ir.Module:
    """The operator for a kind of rows, R and P, multiples of 16; its entry is `attend_latents`.

    (queries, latents, rotary, mask, row_bytes, slot_bytes, num_slots, scale) -> attended (B * Q, R); see
    `extensions.cpu.latents`.
    """
    module = ir.Module(name=f"attention to latents of {kind}, {rank} and {rotary}")
    form = next(form for form in CACHES.all().values() if (form.dtype or "float32") == kind)
    units = _units(module, form, rank, rotary)
    operator = Operator(module, "attend_latents", num_tensors=4)
    code = operator.code
    queries, *_, mask = operator.tensors
    num_rows, num_queries, num_positions = operator.size(queries, 0), operator.size(queries, 1), operator.size(mask, 1)
    out = operator.empty(code.mul(num_rows, num_queries), constant(I64, rank))
    there = code.slot(I32)
    code.intrinsic("torch_get_num_threads", I32, there)
    threads = code.sext(code.read(there, I32), I64)
    of_thread = code.sdiv(code.add(code.mul(num_rows, num_queries), code.sub(threads, 1)), threads)
    whole = code.mul(code.sdiv(code.add(of_thread, _TILE - 1), _TILE), _TILE)
    unit = code.smaller(whole, _QUERIES)
    num_units = code.sdiv(code.add(num_queries, code.sub(unit, 1)), unit)
    given = dict(zip(CONTEXT, map(operator.pointer, (*operator.tensors, out)), strict=False)) | {
        "num_queries": num_queries,
        "num_positions": num_positions,
        "mask_slots": operator.size(mask, 2),
        "row_bytes": operator.argument(4),
        "slot_bytes": operator.argument(5),
        "num_slots": operator.argument(6),
        "scale": operator.argument(7),
        "unit": unit,
    }
    operator.share(code.mul(num_rows, num_units), constant(I64, 1), units, code.stored(CONTEXT, given))
    operator.give(out)
    return module


class _Unit(NamedTuple):
    """The arguments of a unit, and the memory that it computes in.

    Attributes:
        count: number of its queries.
        queries, sums: the addresses of the first query and of its sums.
        masks: the addresses of the queries' lines of the mask.
        latents, rotary: the addresses of both parts of the row's first slot.
        slot_bytes: bytes from a slot to the next.
        scale: factor of scores.
        laid, scales, scores, states: see `_lay`, `_scores`, `_STATE`.
    """

    count: Value
    queries: Value
    sums: Value
    masks: Value
    latents: Value
    rotary: Value
    slot_bytes: Value
    scale: Value
    laid: Value
    scales: Value
    scores: Value
    states: Value

    def state(self, code: Code, query: Value) -> Value:
        """The state of a query; see `_STATE`."""
        return code.at(self.states, code.mul(query, _STATE), F32)

    def line(self, code: Code, query: Value, place: Value = 0) -> Value:
        """Return the address of a query's scores, from a place of the chunk on."""
        return code.at(self.scores, code.add(code.mul(query, _CHUNK), place), F32)


def _units(module: ir.Module, form: CacheFormat, rank: int, rotary: int) -> Value:
    """The part of one thread: the units from `begin` to `end`."""
    width = rank + rotary
    add_chunk = partial(_add_chunk, functions=_Functions.of(module, form, rank, rotary), rank=rank, width=width)
    finish = _finish(module, rank)
    code, (begin, end, words) = Code.begin(module, "units", [I64, I64, POINTER])
    given = code.loaded(CONTEXT, words)
    scale = code.fptrunc(code.bitcast(given["scale"], ir.DoubleType()), F32)
    num_queries, num_positions, mask_slots = given["num_queries"], given["num_positions"], given["mask_slots"]
    spaces = [code.slot(F32, size) for size in (width * LANES, _CHUNK, _QUERIES * _CHUNK, _QUERIES * _STATE)]
    for space in spaces:
        space.align = 64
    masks = code.slot(POINTER, _QUERIES)
    num_units = code.sdiv(code.add(num_queries, code.sub(given["unit"], 1)), given["unit"])
    with code.loop(begin, end, 1) as (number,):
        row, first = code.sdiv(number, num_units), code.mul(code.srem(number, num_units), given["unit"])
        count = code.smaller(code.sub(num_queries, first), given["unit"])
        place = code.add(code.mul(row, num_queries), first)
        queries, sums = (
            code.at(given[name], code.mul(place, size), F32) for name, size in (("queries", width), ("out", rank))
        )
        latents, keys = (code.at(given[name], code.mul(row, given["row_bytes"])) for name in ("latents", "rotary"))
        of_row = count, queries, sums, masks, latents, keys, given["slot_bytes"], scale
        unit = _Unit(*of_row, *spaces)
        with code.loop(0, count, 1) as (query,):
            position = code.srem(code.add(first, query), num_positions)
            token = code.add(code.mul(row, num_positions), position)
            code.write(code.at(given["mask"], code.mul(token, mask_slots), F32), masks, query)
            state = unit.state(code, query)
            code.write(constant(F32S, 0.0), state)
            code.write(constant(F32, LOWEST), state, _MOST)
            with code.loop(0, rank, LANES) as (index,):
                code.write(constant(F32S, 0.0), sums, code.add(code.mul(query, rank), index))
        # Queries follow each other by position, so that these have the masks of all.
        apart = code.smaller(count, num_positions)
        with code.loop(0, mask_slots, _CHUNK) as (chunk,):
            length = code.smaller(code.sub(mask_slots, chunk), _CHUNK)
            with code.if_then(_is_seen(code, masks, apart, chunk, length)):
                add_chunk(code, unit, chunk, length, code.smaller(code.sub(given["num_slots"], chunk), length))
        code.call(finish, [sums, count, unit.states])
    return code.end()


def _is_seen(code: Code, masks: Value, number: Value, chunk: Value, length: Value) -> Value:
    """Whether one of the masks shows a slot of a chunk."""
    with code.loop(0, number, 1, [constant(F32S, LOWEST)]) as most:
        line = code.at(code.read(masks, POINTER, most[0]), chunk, F32)
        with code.loop(0, length, LANES, [most[1]]) as inner:
            inner[1] = code.maximum(inner[1], code.read(line, F32S, inner[0]))
        most[1] = inner[1]
    return code.fcmp_unordered(">", code.halves(most[1], code.maximum), LOWEST)


class _Functions(NamedTuple):
    """The functions that compute a chunk; all but the first are given by their number of queries."""

    lay: Value
    scores_of: dict[int, Value]
    soften_of: dict[int, Value]
    values_of: dict[int, Value]

    @classmethod
    def of(cls, module: ir.Module, form: CacheFormat, rank: int, rotary: int) -> "_Functions":
        """Write the functions into a module."""
        return cls(
            _lay(module, form, (rank, rotary)),
            {number: _scores(module, rank + rotary, number) for number in _SIZES},
            {number: _soften(module, number, is_scaled=bool(form.largest)) for number in _SIZES},
            {number: _values(module, form, rank, number) for number in _SIZES},
        )


def _add_chunk(
    code: Code, unit: _Unit, chunk: Value, length: Value, held: Value, *, functions: _Functions, rank: int, width: int
) -> None:
    """Add a chunk of `length` slots, of which the cache has `held`, to the sums of a unit."""
    parts = [code.at(part, code.mul(chunk, unit.slot_bytes)) for part in (unit.latents, unit.rotary)]
    with code.loop(0, length, LANES) as (block,):
        there = [code.at(part, code.mul(block, unit.slot_bytes)) for part in parts]
        left = code.larger(code.sub(held, block), 1)
        code.call(functions.lay, [*there, unit.slot_bytes, left, unit.laid, code.at(unit.scales, block, F32)])
        with code.loop(0, width, _DIMS) as (start,):
            stop = code.smaller(code.add(start, _DIMS), width)
            for query, call in tiles(code, unit.count, functions.scores_of):
                own = code.at(unit.queries, code.mul(query, width), F32)
                call(unit.laid, own, unit.line(code, query, block), start, stop)
    for query, call in tiles(code, unit.count, functions.soften_of):
        masks, state = code.at(unit.masks, query, I64), unit.state(code, query)
        call(unit.line(code, query), length, masks, chunk, unit.scale, unit.scales, state)
    with code.loop(0, rank, LANES) as (index,):
        for query, call in tiles(code, unit.count, functions.values_of):
            own = code.at(unit.sums, code.add(code.mul(query, rank), index), F32)
            call(parts[0], index, unit.slot_bytes, held, unit.line(code, query), unit.state(code, query), own)


def _lay(module: ir.Module, form: CacheFormat, widths: Sequence[int]) -> Value:
    """Transpose 16 latents and rotary keys; if there are fewer, the last one is repeated.

    (latents, rotary keys, bytes of a slot, their number, space, scales of the latents).
    """
    kinds = [POINTER, POINTER, I64, I64, POINTER, POINTER]
    code, (*parts, slot_bytes, number, space, scales) = Code.begin(module, "lay", kinds)
    last, before = code.sub(number, 1), 0
    for part, (rows, width) in enumerate(zip(parts, widths, strict=True)):
        starts = [code.at(rows, code.mul(code.smaller(lane, last), slot_bytes)) for lane in range(LANES)]
        factors = []
        if form.largest:
            found = [row_scale(code, form, width, start) for start in starts]
            factors = [code.splat(each) for each in found]
            for lane, scale in enumerate(found) if part == 0 else ():
                code.write(scale, scales, lane)
        with code.loop(0, width, LANES) as (index,):
            read = [code.widened(form.dtype, start, index) for start in starts]
            if factors:
                read = [code.fmul(each, factor) for each, factor in zip(read, factors, strict=True)]
            for place, column in enumerate(transposed(code, read)):
                code.write(column, space, code.mul(code.add(index, before + place), LANES))
        before += width
    return code.end()


def _scores(module: ir.Module, width: int, num_queries: int) -> Value:
    """Add products of some queries with 16 keys up: (transposed keys, queries, scores, first dimension, end)."""
    kinds = [POINTER, POINTER, POINTER, I64, I64]
    code, (laid, queries, scores, start, stop) = Code.begin(module, f"scores_{num_queries}", kinds)
    numbers, step, is_first = range(num_queries), 4, code.icmp_signed("==", start, 0)
    begun = [code.select(is_first, 0.0, code.read(scores, F32S, number * _CHUNK)) for number in numbers]
    with code.loop(start, stop, step, begun) as values:
        for place in range(step):
            index = code.add(values[0], place)
            keys = code.read(laid, F32S, code.mul(index, LANES))
            for number in numbers:
                query = code.splat(code.read(queries, F32, code.add(index, number * width)))
                values[1 + number] = code.fused(query, keys, values[1 + number])
    for number in numbers:
        code.write(values[1 + number], scores, number * _CHUNK)
    return code.end()


def _soften(module: ir.Module, num_queries: int, *, is_scaled: bool) -> Value:
    """Turn products of a chunk into weights of values: (products, their number, masks, chunk, scale, scales, states).

    With `is_scaled`, the exponentials are multiplied by the scales of the values.
    """
    kinds = [POINTER, I64, POINTER, I64, F32, POINTER, POINTER]
    code, (scores, length, masks, chunk, scale, scales, states) = Code.begin(module, f"soften_{num_queries}", kinds)
    numbers, factor = range(num_queries), code.splat(scale)
    lines = [code.at(code.read(masks, POINTER, number), chunk, F32) for number in numbers]
    own = [code.at(states, number * _STATE, F32) for number in numbers]
    with code.loop(0, length, LANES, [constant(F32S, LOWEST)] * num_queries) as values:
        for number in numbers:
            place = code.add(values[0], number * _CHUNK)
            score = code.fused(code.read(scores, F32S, place), factor, code.read(lines[number], F32S, values[0]))
            code.write(score, scores, place)
            values[1 + number] = code.maximum(values[1 + number], score)
    before = [code.read(state, F32, _MOST) for state in own]
    largest = [code.halves(vector, code.maximum) for vector in values[1:]]
    most = [code.maximum(*pair) for pair in zip(before, largest, strict=True)]
    fading = [code.exponential(code.splat(code.fsub(*pair))) for pair in zip(before, most, strict=True)]
    sums = [code.fmul(code.read(state, F32S), each) for state, each in zip(own, fading, strict=True)]
    shifts = [code.splat(value) for value in most]
    with code.loop(0, length, LANES, sums) as values:
        for number in numbers:
            place = code.add(values[0], number * _CHUNK)
            score = code.read(scores, F32S, place)
            weight = code.exponential(code.fsub(score, shifts[number]))
            weight = code.select(code.fcmp_unordered(">", score, LOWEST), weight, 0.0)
            values[1 + number] = code.fadd(values[1 + number], weight)
            if is_scaled:
                weight = code.fmul(weight, code.read(scales, F32S, values[0]))
            code.write(weight, scores, place)
    for state, total, score, each in zip(own, values[1:], most, fading, strict=True):
        code.write(total, state)
        code.write(score, state, _MOST)
        code.write(code.extract_element(each, constant(I32, 0)), state, _FACTOR)
    return code.end()


def _values(module: ir.Module, form: CacheFormat, rank: int, num_queries: int) -> Value:
    """Add 16 numbers of a chunk's weighted latents to queries' sums.

    (latents, the first of the numbers, bytes of a slot, number of slots, weights, states, sums).
    """
    kinds = [POINTER, I64, I64, I64, POINTER, POINTER, POINTER]
    code, given = Code.begin(module, f"values_{num_queries}", kinds)
    latents, index, slot_bytes, length, weights, states, sums = given
    numbers, begun = range(num_queries), []
    for number in numbers:
        fading = code.splat(code.read(states, F32, number * _STATE + _FACTOR))
        begun.append(code.fmul(code.read(sums, F32S, number * rank), fading))
    with code.loop(0, length, 1, begun) as carried:
        value = code.widened(form.dtype, code.at(latents, code.mul(carried[0], slot_bytes)), index)
        for number in numbers:
            weight = code.splat(code.read(weights, F32, code.add(carried[0], number * _CHUNK)))
            carried[1 + number] = code.fused(weight, value, carried[1 + number])
    for number, value in zip(numbers, carried[1:], strict=True):
        code.write(value, sums, number * rank)
    return code.end()


def _finish(module: ir.Module, rank: int) -> Value:
    """Divide by the sums of exponentials: (sums, number of queries, states)."""
    code, (sums, count, states) = Code.begin(module, "finish", [POINTER, I64, POINTER])
    with code.loop(0, count, 1) as (query,):
        state = code.at(states, code.mul(query, _STATE), F32)
        total = code.halves(code.read(state, F32S), code.fadd)
        # A largest score that is not finite makes the result NaN.
        total = code.splat(code.fused(code.read(state, F32, _MOST), 0.0, total))
        with code.loop(0, rank, LANES) as (index,):
            place = code.add(code.mul(query, rank), index)
            code.write(code.fdiv(code.read(sums, F32S, place), total), sums, place)
    return code.end()
