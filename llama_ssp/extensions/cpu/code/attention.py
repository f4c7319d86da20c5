"""Attention over the cache as torch calls it: turn queries and keys, write keys and values, attend to each own length.

    place    a token's queries, scaled, and its keys are turned; keys and values go to the token's slot
    units    a key-value head of a row, with up to 32 of its queries

Threads take parts of the tokens, then of the units, where there is enough to do for more than one.

For a unit, keys are read in chunks of 128 slots, from slot 0 on. In a chunk, 16 keys at a time are transposed, so that
a vector is one dimension of 16 keys and no sum crosses lanes. Then the scores are turned into exponentials relative to
the largest score so far, and the values are added, one slot after the other. So the sums of a query take the same steps
whatever else is computed: other queries, the batch, the length of the cache. A slot after a query's own, or before its
window, counts as zero.

A node of a tree sees the text, the root, and its ancestors among the other nodes, whose slots follow the root's. These
slots are read in the order that they would have if the path were the text, so a node has the bits of a token of a
chain:

    slots     text ... | root | 1 | 2 | 3 | 4 |        4 is a child of 2
    of node 4 text ... | root | 2 | 4 |

Keys and values are in the cache as its format has them (`parts.KeptRows`), and are widened in registers: a key once for
all queries of a unit, a value once for a tile of them. Scales are multiplied into scores and values.

Shapes: M tokens, B rows, T tokens of a row, H query heads, N key-value heads, G = H / N, D head dim, S slots of all
rows.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from llvmlite import ir

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.code.emit import (
    F16S,
    F32,
    F32S,
    I8,
    I8S,
    I16S,
    I32,
    I32S,
    I64,
    POINTER,
    Code,
    Operator,
    Value,
    constant,
)
from llama_ssp.extensions.cpu.code.instructions import has_features
from llama_ssp.extensions.cpu.code.kinds import E4M3_DTYPE, E4M3_SHRINK
from llama_ssp.storage.formats import CACHES, CacheFormat

_SERIAL = 2**17
"""The most multiplications for which one more thread does not pay."""

CONTEXT = dict.fromkeys(("qkv", "turns", "positions", "slots", "parts", "own_slots", "sees", "out"), POINTER)
CONTEXT |= dict.fromkeys(("num_heads", "num_kv", "row_tokens", "num_slots", "num_behind", "window", "scale"), I64)
"""Words that the threads share."""
QUERIES, CHUNK = 32, 128
"""The most queries of a unit, and the slots of a chunk."""
_AHEAD = 256
"""How many slots before its use a key is prefetched; a value is prefetched while the keys of its chunk are read."""
_LINE = 64
"""Bytes of a cache line."""
LOWEST = -3e38
"""A number below all scores."""
_SCORED, _SOFTENED, _SUMMED = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)
"""Numbers of queries that a tile may have: in the step of scores, of exponentials, and of weighted values."""
_REGISTERS = 16
"""Vectors of a tile's sums; the remaining registers hold operands."""
_FEW_SCORED, _FEW_SUMMED, _FEW_REGISTERS = (1, 2, 3), (1, 2), 4
"""The same numbers where a vector takes two of 16 registers (AVX2): more sums would go through memory at every step."""
_MOST, _FACTOR, _STATE = LANES, LANES + 1, 2 * LANES
"""State of a query between chunks: sums of exponentials, the largest score, the last change of scale."""


def emit(kind: str, head_dim: int) -> ir.Module:
    """The operator for a kind of rows, and heads of D dimensions, a multiple of 16; its entry is `attend`."""
    module = ir.Module(name=f"attention of {kind} and {head_dim}")
    form = next(form for form in CACHES.all().values() if (form.dtype or "float32") == kind)
    place, units = _place(module, form, head_dim), _units(module, form, head_dim)
    place.linkage = units.linkage = "external"  # `layer` calls them too
    _entry(module, head_dim, place, units)
    return module


def _entry(module: ir.Module, head_dim: int, place: Value, units: Value) -> None:
    """(qkv, turns, positions, slots, parts, own_slots, sees, num_heads, scale, window) -> attended."""
    operator = Operator(module, "attend", num_tensors=7)
    code = operator.code
    qkv, _, positions, _, cache, _, sees = operator.tensors
    num_heads = operator.argument(7)
    num_tokens = operator.size(qkv, 0)
    num_kv = code.sdiv(operator.size(cache, 0), 2)
    out = operator.empty(num_tokens, code.mul(num_heads, head_dim))
    given = dict(zip(CONTEXT, map(operator.pointer, (*operator.tensors, out)), strict=False)) | {
        "num_heads": num_heads,
        "num_kv": num_kv,
        "row_tokens": operator.size(positions, 1),
        "num_slots": operator.size(cache, 1),
        "num_behind": operator.size(sees, 2),
        "scale": operator.argument(8),
        "window": operator.argument(9),
    }
    words = code.stored(CONTEXT, given)
    heads = code.add(num_heads, code.mul(num_kv, 2))
    operator.share(num_tokens, _grain(code, heads, head_dim), place, words)
    with code.loop(0, num_tokens, 1, [0]) as values:
        values[1] = code.larger(values[1], code.read(given["own_slots"], I64, values[0]))
    in_pass = code.smaller(_queries_of_row(code, given), QUERIES)
    cost = code.mul(head_dim, code.add(code.mul(in_pass, 2), 8))
    grain = _grain(code, cost, code.add(values[1], 1))
    operator.share(num_units(code, given, num_tokens), grain, units, words)
    operator.give(out)


def num_units(code: Code, given: dict[str, Value], num_tokens: Value) -> Value:
    """Return the number of units: key-value heads of rows, each with at most `QUERIES` of its queries."""
    num_rows = code.sdiv(num_tokens, given["row_tokens"])
    return code.mul(code.mul(num_rows, given["num_kv"]), _passes(code, _queries_of_row(code, given)))


def _grain(code: Code, cost: Value, times: Value) -> Value:
    """Return the least number of units of this cost that a thread computes."""
    return code.add(code.sdiv(_SERIAL, code.mul(cost, times)), 1)


def _queries_of_row(code: Code, given: dict[str, Value]) -> Value:
    """Return the number of queries of a row that share a key-value head."""
    return code.mul(given["row_tokens"], code.sdiv(given["num_heads"], given["num_kv"]))


def _passes(code: Code, queries: Value) -> Value:
    return code.sdiv(code.add(queries, QUERIES - 1), QUERIES)


def _given(code: Code, words: Value) -> dict[str, Value]:
    given = code.loaded(CONTEXT, words)
    return given | {"scale": code.fptrunc(code.bitcast(given["scale"], ir.DoubleType()), F32)}


def _place(module: ir.Module, form: CacheFormat, head_dim: int) -> Value:
    """Turn and write the tokens from `begin` to `end`; turned queries wait where their results go."""
    code, (begin, end, words) = Code.begin(module, "place", [I64, I64, POINTER])
    given, dim = _given(code, words), head_dim
    num_heads, num_kv = given["num_heads"], given["num_kv"]
    scale, turned = code.splat(given["scale"]), code.add(num_heads, num_kv)
    write = _write(module, form, head_dim)
    space = code.slot(F32, head_dim)
    space.align = 64
    with code.loop(begin, end, 1) as (token,):
        turns = code.at(given["turns"], code.mul(code.read(given["positions"], I64, token), dim), F32)
        slot = code.read(given["slots"], I64, token)
        x = code.at(given["qkv"], code.mul(code.mul(token, code.add(turned, num_kv)), dim), F32)
        with code.loop(0, num_heads, 1) as (head,), code.loop(0, dim, LANES) as (index,):
            place = code.add(code.mul(head, dim), index)
            first = code.mul(code.mul(token, num_heads), dim)
            vector = _turned(code, code.read(x, F32S, place), code.read(turns, F32S, index))
            code.write(code.fmul(vector, scale), given["out"], code.add(first, place))
        with code.loop(0, num_kv, 1) as (head,):
            key, value = (code.at(x, code.mul(code.add(head, before), dim), F32) for before in (num_heads, turned))
            key_row, value_row = (
                _row(
                    code,
                    form,
                    head_dim,
                    given["parts"],
                    code.add(code.mul(code.add(head, before), given["num_slots"]), slot),
                )
                for before in (0, num_kv)
            )
            with code.loop(0, dim, LANES) as (index,):
                code.write(_turned(code, code.read(key, F32S, index), code.read(turns, F32S, index)), space, index)
            code.call(write, [space, key_row])
            code.call(write, [value, value_row])
    return code.end()


def _units(module: ir.Module, form: CacheFormat, head_dim: int) -> Value:
    """The part of one thread: the units from `begin` to `end`."""
    unit = unit_of(module, form, head_dim)
    code, (begin, end, words) = Code.begin(module, "units", [I64, I64, POINTER])
    given, dim = _given(code, words), head_dim
    num_heads, num_kv, row_tokens = given["num_heads"], given["num_kv"], given["row_tokens"]
    group, queries = code.sdiv(num_heads, num_kv), _queries_of_row(code, given)
    passes = _passes(code, queries)
    pointers, places, positions = (code.slot(kind, QUERIES) for kind in (POINTER, I64, I64))
    num_behind = given["num_behind"]
    paths = code.alloca(I64, code.mul(num_behind, QUERIES))
    paths.type = POINTER
    with code.loop(begin, end, 1) as (number,):
        head_of_row, first = code.sdiv(number, passes), code.mul(code.srem(number, passes), QUERIES)
        row, head = code.sdiv(head_of_row, num_kv), code.srem(head_of_row, num_kv)
        count = code.smaller(code.sub(queries, first), QUERIES)
        first_token = code.mul(row, row_tokens)
        last_token = code.sub(code.add(first_token, row_tokens), 1)
        root = code.sub(code.add(code.read(given["own_slots"], I64, last_token), 1), num_behind)
        with code.loop(0, count, 1) as (query,):
            place = code.add(first, query)
            token = code.add(first_token, code.sdiv(place, group))
            own_head = code.add(code.mul(head, group), code.srem(place, group))
            at = code.mul(code.add(code.mul(token, num_heads), own_head), dim)
            code.write(code.at(given["out"], at, F32), pointers, query)
            code.write(code.read(given["positions"], I64, token), positions, query)
            path = code.at(paths, code.mul(query, num_behind), I64)
            sees = code.at(given["sees"], code.mul(token, num_behind))
            with code.loop(0, num_behind, 1, [constant(I64, 0)]) as values:
                code.write(code.add(root, values[0]), path, values[1])
                values[1] = code.add(values[1], code.zext(code.read(sees, I8, values[0]), I64))
            of_path = code.sub(code.add(root, values[1]), 1)
            is_node = code.icmp_signed(">", num_behind, 0)
            code.write(code.select(is_node, of_path, code.read(given["own_slots"], I64, token)), places, query)
        first_slot = code.sub(
            code.read(given["slots"], I64, first_token), code.read(given["own_slots"], I64, first_token)
        )
        keys, values = (
            _row(code, form, head_dim, given["parts"], code.add(code.mul(part, given["num_slots"]), first_slot))
            for part in (head, code.add(head, num_kv))
        )
        code.call(unit, [keys, values, pointers, places, positions, count, given["window"], paths, num_behind, root])
    return code.end()


def _row_bytes(form: CacheFormat, head_dim: int) -> int:
    return form.row_bytes(head_dim, value_bytes=4)


def _row(code: Code, form: CacheFormat, head_dim: int, rows: Value, number: Value) -> Value:
    return code.at(rows, code.mul(number, _row_bytes(form, head_dim)))


def row_scale(code: Code, form: CacheFormat, head_dim: int, row: Value) -> Value:
    """The factor of a row's widened numbers."""
    scale = code.read(code.at(row, head_dim), F32)
    return code.fmul(scale, E4M3_SHRINK) if form.dtype == E4M3_DTYPE else scale


def _write(module: ir.Module, form: CacheFormat, head_dim: int) -> Value:
    """Write a row as `KeptRows.pack` does: (numbers, row)."""
    code, (x, row) = Code.begin(module, "write", [POINTER, POINTER])
    factor = None
    if form.largest:
        scale, factor = code.scales_of(x, head_dim, form.largest)
        code.write(scale, code.at(row, head_dim))
    with code.loop(0, head_dim, LANES) as (index,):
        numbers = code.read(x, F32S, index)
        numbers = numbers if factor is None else code.fmul(numbers, factor)
        code.write(_narrowed(code, form, numbers), row, index)
    return code.end()


def _narrowed(code: Code, form: CacheFormat, numbers: Value) -> Value:
    """16 numbers as they are kept, rounded to the nearest, ties to even."""
    if form.dtype is None:
        return numbers
    if form.dtype == "float16":
        return code.fptrunc(numbers, F16S)
    if form.dtype == "bfloat16":
        return code.trunc(code.without_bits(code.bitcast(numbers, I32S), 16), I16S)
    if form.dtype == "int8":
        steps = code.intrinsic("llvm.nearbyint.v16f32", F32S, numbers)
        return code.trunc(code.fptosi(steps, I32S), I8S)
    # 2^-120 times as large, the number has the exponent's bits of E4M3, also where they are 0.
    bits = code.bitcast(code.fmul(numbers, 2.0**-120), I32S)
    sign = code.and_(code.lshr(bits, 24), 0x80)
    size = code.without_bits(code.and_(bits, 0x7FFFFFFF), 20)
    return code.trunc(code.or_(size, sign), I8S)


def _turned(code: Code, x: Value, turns: Value) -> Value:
    """Multiply pairs of numbers by pairs (cosine, sine), as complex numbers."""
    cosines, sines = (code.shuffled(turns, turns, [lane // 2 * 2 + part for lane in range(LANES)]) for part in (0, 1))
    others = code.shuffled(x, x, [lane ^ 1 for lane in range(LANES)])
    signs = ir.Constant(F32S, [-1.0, 1.0] * (LANES // 2))
    return code.fused(x, cosines, code.fmul(others, code.fmul(sines, signs)))


class _Unit(NamedTuple):
    """The arguments of a unit, and the memory that it computes in.

    Attributes:
        keys, values: the first row of the head, in this row of the batch.
        queries: the addresses of the queries, where their results go.
        places: places of the queries' own keys.
        positions: positions of the queries.
        count: number of the queries.
        window: how many positions a query sees, 0 for all.
        paths: the slots that each query sees from the root on.
        num_behind: number of slots that a path has room for.
        root: the root's slot, from which on a path says which slot is next.
        laid, scores, sums, states: see `_lay`, `_scores`, `_values`, `_STATE`.
    """

    keys: Value
    values: Value
    queries: Value
    places: Value
    positions: Value
    count: Value
    window: Value
    paths: Value
    num_behind: Value
    root: Value
    laid: Value
    scores: Value
    sums: Value
    states: Value

    def slot_of(self, code: Code, query: Value, place: Value) -> Value:
        """Return the slot of a place on a query's path; places after the end have the slot of the last one."""
        place = code.smaller(place, code.read(self.places, I64, query))
        of_path = code.add(code.mul(query, self.num_behind), code.larger(code.sub(place, self.root), 0))
        return code.select(code.icmp_signed("<", place, self.root), place, code.read(self.paths, I64, of_path))

    def line(self, code: Code, query: Value, place: Value = 0) -> Value:
        """Return the address of a query's scores, from a place of the chunk on."""
        return code.at(self.scores, code.add(code.mul(query, CHUNK), place), F32)

    def state(self, code: Code, query: Value) -> Value:
        """The state of a query; see `_STATE`."""
        return code.at(self.states, code.mul(query, _STATE), F32)


_KINDS = [*[POINTER] * 5, I64, I64, POINTER, I64, I64, *[POINTER] * 4]
"""The types of the values of a unit."""


def unit_of(module: ir.Module, form: CacheFormat, head_dim: int) -> Value:
    """Attend from some queries of a row to a head; the arguments are the first ones of `_Unit`."""
    sizes = (head_dim + 1) * LANES, QUERIES * CHUNK, QUERIES * head_dim, QUERIES * _STATE
    score, add = _score_chunk(module, form, head_dim), _add_chunk(module, form, head_dim)
    soften_of = {number: _soften(module, number) for number in _SOFTENED}
    finish = _finish(module, head_dim)
    code, given = Code.begin(module, "unit", _KINDS[: -len(sizes)])
    spaces = [code.slot(F32, size) for size in sizes]
    for space in spaces:
        space.align = 64
    unit = _Unit(*given, *spaces)
    with code.loop(0, unit.count, 1) as (query,):
        state = unit.state(code, query)
        code.write(constant(F32S, 0.0), state)
        code.write(constant(F32, LOWEST), state, _MOST)
        with code.loop(0, head_dim, LANES) as (index,):
            code.write(constant(F32S, 0.0), unit.sums, code.add(code.mul(query, head_dim), index))
    start, stop = _range(code, unit.places, unit.positions, unit.count, unit.window)
    with code.loop(start, stop, CHUNK) as (chunk,):
        length = code.smaller(code.sub(stop, chunk), CHUNK)
        code.call(score, [*unit, chunk, length])
        for query, call in tiles(code, unit.count, soften_of):
            own = (code.at(numbers, query, I64) for numbers in (unit.places, unit.positions))
            call(unit.line(code, query), length, *own, chunk, unit.window, unit.state(code, query))
        code.call(add, [*unit, chunk, length])
    code.call(finish, [unit.queries, unit.count, unit.states, unit.sums])
    return code.end()


def _is_wide() -> bool:
    """Whether a vector is one register."""
    return has_features(("avx512f",))


def _score_chunk(module: ir.Module, form: CacheFormat, head_dim: int) -> Value:
    """The scores of all queries with the keys of a chunk: (unit, first slot, number)."""
    lay, lay_path = (_lay(module, form, head_dim, by_rows=by_rows) for by_rows in (False, True))
    scores_of = {number: _scores(module, form, head_dim, number) for number in (_SCORED if _is_wide() else _FEW_SCORED)}
    code, (*given, chunk, length) = Code.begin(module, "score_chunk", [*_KINDS, I64, I64])
    unit, rows, behind = _Unit(*given), code.slot(POINTER, LANES), code.add(chunk, length)
    with code.loop(0, length, LANES) as (block,):
        place = code.add(chunk, block)
        for line, slots in ((unit.keys, _AHEAD), (unit.values, 0)):
            ahead = _row(code, form, head_dim, line, code.add(place, slots))
            _fetch(code, ahead, LANES * _row_bytes(form, head_dim))
        is_text = code.icmp_signed("<=", code.smaller(code.add(place, LANES), behind), unit.root)
        with code.if_else(is_text) as (of_all, of_each):
            with of_all:
                code.call(lay, [_row(code, form, head_dim, unit.keys, place), code.sub(length, block), unit.laid])
                for query, call in tiles(code, unit.count, scores_of):
                    call(unit.laid, code.at(unit.queries, query, I64), unit.line(code, query, block))
            with of_each, code.loop(0, unit.count, 1) as (query,):
                with code.loop(0, LANES, 1) as (lane,):
                    slot = unit.slot_of(code, query, code.add(place, lane))
                    code.write(_row(code, form, head_dim, unit.keys, slot), rows, lane)
                code.call(lay_path, [rows, constant(I64, LANES), unit.laid])
                own = code.at(unit.queries, query, I64)
                code.call(scores_of[1], [unit.laid, own, unit.line(code, query, block)])
    return code.end()


def _add_chunk(module: ir.Module, form: CacheFormat, head_dim: int) -> Value:
    """Add the weighted values of a chunk to the sums of all queries: (unit, first slot, number)."""
    widest = max(_REGISTERS * LANES // head_dim, 1)
    numbers = [number for number in _SUMMED if number <= widest] if _is_wide() else _FEW_SUMMED
    values_of = {number: _values(module, form, head_dim, number) for number in numbers}
    code, (*given, chunk, length) = Code.begin(module, "add_chunk", [*_KINDS, I64, I64])
    unit, behind = _Unit(*given), code.add(chunk, length)

    def sums(query: Value) -> Value:
        return code.at(unit.sums, code.mul(query, head_dim), F32)

    first = _row(code, form, head_dim, unit.values, chunk)
    of_text = code.smaller(length, code.larger(code.sub(unit.root, chunk), 0))
    for query, call in tiles(code, unit.count, values_of):
        call(first, of_text, unit.line(code, query), unit.state(code, query), sums(query))
    with code.if_then(code.icmp_signed(">", behind, unit.root)), code.loop(0, unit.count, 1) as (query,):
        state = unit.state(code, query)
        code.write(constant(F32, 1.0), state, _FACTOR)  # the call above has changed the scale
        last = code.smaller(behind, code.add(code.read(unit.places, I64, query), 1))
        with code.loop(code.larger(unit.root, chunk), last, 1) as (place,):
            row = _row(code, form, head_dim, unit.values, unit.slot_of(code, query, place))
            weight = unit.line(code, query, code.sub(place, chunk))
            code.call(values_of[1], [row, constant(I64, 1), weight, state, sums(query)])
    return code.end()


def _fetch(code: Code, place: Value, num_bytes: int) -> None:
    """Prefetch rows into the second-level cache; addresses beyond the end of the memory are allowed."""
    with code.loop(0, num_bytes, _LINE) as (index,):
        hints = (constant(I32, hint) for hint in (0, 2, 1))  # to read, near, data
        code.intrinsic("llvm.prefetch.p0", ir.VoidType(), code.at(place, index), *hints)


def tiles(code: Code, count: Value, functions: dict[int, Value]) -> Iterator[tuple[Value, Callable[..., Value]]]:
    """Loop over queries, as many at a time as there is a function for; yields the first one and the call."""
    start = 0
    for number in sorted(functions, reverse=True):
        stop = code.sub(count, code.srem(code.sub(count, start), number))
        with code.loop(start, stop, number) as (query,):
            yield query, lambda *arguments, callee=functions[number]: code.call(callee, arguments)
        start = stop


def _range(code: Code, places: Value, positions: Value, count: Value, window: Value) -> tuple[Value, Value]:
    """Return the start of the first chunk that some query sees, and the slot after the last that some query sees."""
    with code.loop(0, count, 1, [code.read(positions, I64), code.read(places, I64)]) as values:
        position, place = (code.read(numbers, I64, values[0]) for numbers in (positions, places))
        values[1:] = [code.smaller(values[1], position), code.larger(values[2], place)]
    _, least, last = values
    behind = code.larger(code.sub(code.add(least, 1), window), 0)
    start = code.sub(behind, code.srem(behind, CHUNK))
    return code.select(code.icmp_signed(">", window, 0), start, 0), code.add(last, 1)


def _lay(module: ir.Module, form: CacheFormat, head_dim: int, *, by_rows: bool) -> Value:
    """Transpose 16 keys; if there are fewer, the last one is repeated: (keys, their number, space).

    The scales of the keys, if they have some, come after them. With `by_rows`, the first argument has the addresses of
    the keys.
    """
    code, (keys, number, space) = Code.begin(module, "lay_path" if by_rows else "lay", [POINTER, I64, POINTER])
    last = code.sub(number, 1)
    rows = [
        code.read(keys, POINTER, lane) if by_rows else _row(code, form, head_dim, keys, code.smaller(lane, last))
        for lane in range(LANES)
    ]
    with code.loop(0, head_dim, LANES) as (index,):
        read = [code.widened(form.dtype, row, index) for row in rows]
        for number, column in enumerate(transposed(code, read)):
            code.write(column, space, code.mul(code.add(index, number), LANES))
    if form.largest:
        for lane, row in enumerate(rows):
            code.write(row_scale(code, form, head_dim, row), space, head_dim * LANES + lane)
    return code.end()


def transposed(code: Code, rows: list[Value]) -> list[Value]:
    """The columns of 16 vectors, by shuffles of two vectors that processors have as one instruction."""
    fours = range(0, LANES, 4)
    ones, twos = ([four + lane for four in fours for lane in lanes] for lanes in ((0, 16, 1, 17), (0, 1, 16, 17)))
    halves = [source + four + lane for source in (0, LANES) for four in (0, 8) for lane in range(4)]
    for size, low, beyond in ((1, ones, 2), (2, twos, 2), (4, halves, 4), (8, halves, 4)):
        high = [lane + beyond for lane in low]
        for row in (row for row in range(LANES) if not row & size):
            pair = rows[row], rows[row + size]
            rows[row], rows[row + size] = code.shuffled(*pair, low), code.shuffled(*pair, high)
    # The first shuffles have left the columns of each four in the order 0, 2, 1, 3.
    return [rows[four + place] for four in fours for place in (0, 2, 1, 3)]


def _scores(module: ir.Module, form: CacheFormat, head_dim: int, num_queries: int) -> Value:
    """The scores of some queries with 16 keys: (transposed keys, queries, scores)."""
    code, (laid, queries, scores) = Code.begin(module, f"scores_{num_queries}", [POINTER, POINTER, POINTER])
    starts = [code.read(queries, POINTER, number) for number in range(num_queries)]
    with code.loop(0, head_dim, 2, [constant(F32S, 0.0)] * (2 * num_queries)) as values:
        for odd in (0, 1):
            index = code.add(values[0], odd)
            keys = code.read(laid, F32S, code.mul(index, LANES))
            for number, start in enumerate(starts):
                at = 1 + 2 * number + odd
                values[at] = code.fused(code.splat(code.read(start, F32, index)), keys, values[at])
    for number in range(num_queries):
        even, odd = values[1 + 2 * number : 3 + 2 * number]
        total = code.fadd(even, odd)
        if form.largest:
            total = code.fmul(total, code.read(laid, F32S, head_dim * LANES))
        code.write(total, scores, number * CHUNK)
    return code.end()


def _soften(module: ir.Module, num_queries: int) -> Value:
    """Turn scores of a chunk into exponentials: (scores, their number, slots, positions, first slot, window, states).

    The function handles several queries at once, since each step of one query waits for the step before.
    """
    code, (scores, length, places, positions, chunk, window, states) = Code.begin(
        module, f"soften_{num_queries}", [POINTER, I64, POINTER, POINTER, I64, I64, POINTER]
    )
    numbers, has_window = range(num_queries), code.icmp_signed(">", window, 0)
    own, at = ([code.sub(code.read(slots, I64, number), chunk) for number in numbers] for slots in (places, positions))
    firsts = [code.select(has_window, code.sub(position, window), -(2**31)) for position in at]
    firsts, lasts = ([code.splat(code.trunc(slot, I32)) for slot in slots] for slots in (firsts, own))
    states = [code.at(states, number * _STATE, F32) for number in numbers]

    def seen(index: Value, number: int, value: Value, instead: float) -> Value:
        lanes = code.add(code.splat(code.trunc(index, I32)), ir.Constant(ir.VectorType(I32, LANES), [*range(LANES)]))
        is_near = code.and_(code.icmp_signed("<=", lanes, lasts[number]), code.icmp_signed(">", lanes, firsts[number]))
        return code.select(is_near, value, instead)

    def lines(index: Value) -> list[Value]:
        return [code.add(index, number * CHUNK) for number in numbers]

    with code.loop(0, length, LANES, [constant(F32S, LOWEST)] * num_queries) as values:
        for number, place in enumerate(lines(values[0])):
            score = code.read(scores, F32S, place)
            score = seen(values[0], number, score, LOWEST)
            values[1 + number] = code.maximum(values[1 + number], score)
    before = [code.read(state, F32, _MOST) for state in states]
    largest = [code.halves(vector, code.maximum) for vector in values[1:]]
    most = [code.maximum(*pair) for pair in zip(before, largest, strict=True)]
    factors = [code.exponential(code.splat(code.fsub(*pair))) for pair in zip(before, most, strict=True)]
    sums = [code.fmul(code.read(state, F32S), factor) for state, factor in zip(states, factors, strict=True)]
    shifts = [code.splat(value) for value in most]
    with code.loop(0, length, LANES, sums) as values:
        for number, place in enumerate(lines(values[0])):
            score = code.read(scores, F32S, place)
            weight = code.exponential(code.fsub(score, shifts[number]))
            weight = seen(values[0], number, weight, 0.0)
            code.write(weight, scores, place)
            values[1 + number] = code.fadd(values[1 + number], weight)
    for state, total, score, factor in zip(states, values[1:], most, factors, strict=True):
        code.write(total, state)
        code.write(score, state, _MOST)
        code.write(code.extract_element(factor, constant(I32, 0)), state, _FACTOR)
    return code.end()


def _values(module: ir.Module, form: CacheFormat, head_dim: int, num_queries: int) -> Value:
    """Add the weighted values of a chunk to some queries' sums: (values, their number, weights, states, sums)."""
    code, (values, length, weights, states, sums) = Code.begin(
        module, f"values_{num_queries}", [POINTER, I64, POINTER, POINTER, POINTER]
    )
    factors = [code.splat(code.read(states, F32, query * _STATE + _FACTOR)) for query in range(num_queries)]
    num_parts, at_once = head_dim // LANES, head_dim // LANES if _is_wide() else _FEW_REGISTERS // num_queries
    for first in range(0, num_parts, at_once):
        parts = range(first, min(first + at_once, num_parts))
        places = [(query, part) for query in range(num_queries) for part in parts]
        begun = [
            code.fmul(code.read(sums, F32S, query * head_dim + part * LANES), factors[query]) for query, part in places
        ]
        with code.loop(0, length, 1, begun) as carried:
            row = _row(code, form, head_dim, values, carried[0])
            read = [code.widened(form.dtype, row, part * LANES) for part in parts]
            if form.largest:
                scale = code.splat(row_scale(code, form, head_dim, row))
                read = [code.fmul(part, scale) for part in read]
            for query in range(num_queries):
                weight = code.splat(code.read(weights, F32, code.add(carried[0], query * CHUNK)))
                for place, part in enumerate(read):
                    at = 1 + query * len(parts) + place
                    carried[at] = code.fused(weight, part, carried[at])
        for (query, part), value in zip(places, carried[1:], strict=True):
            code.write(value, sums, query * head_dim + part * LANES)
    return code.end()


def _finish(module: ir.Module, head_dim: int) -> Value:
    """Divide by the sums of exponentials: (where results go, number of queries, states, sums)."""
    code, (queries, count, states, sums) = Code.begin(module, "finish", [POINTER, I64, POINTER, POINTER])
    with code.loop(0, count, 1) as (query,):
        state = code.at(states, code.mul(query, _STATE), F32)
        total = code.halves(code.read(state, F32S), code.fadd)
        # A largest score that is not finite makes the result NaN.
        total = code.fused(code.read(state, F32, _MOST), 0.0, total)
        into = code.read(queries, POINTER, query)
        with code.loop(0, head_dim, LANES) as (index,):
            part = code.read(sums, F32S, code.add(code.mul(query, head_dim), index))
            code.write(code.fdiv(part, code.splat(total)), into, index)
    return code.end()
