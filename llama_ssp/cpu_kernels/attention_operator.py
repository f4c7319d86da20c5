"""Attention over the cache as torch calls it: turn queries and keys, write keys and values, attend to each own length.

    place    a token's queries, scaled, and its keys are turned; keys and values go to the token's slot
    units    a key-value head of a row, with up to 32 of its queries: `attention_kernel`

Threads take parts of the tokens, then of the units, where there is enough to do for more than one.

Shapes: M tokens, B rows, T tokens of a row, H query heads, N key-value heads, G = H / N, D head dim, S slots of all
rows.
"""

from llvmlite import ir

from llama_ssp.cpu_kernels.attention_kernel import QUERIES, lane_numbers, larger, smaller, unit_of
from llama_ssp.cpu_kernels.emit import F32, F32S, I32, I64, LANES, POINTER, Code, Value, f32, i64
from llama_ssp.cpu_kernels.operator import Torch
from llama_ssp.cpu_kernels.products import function

FEATURES = ("fma",)
"""Instructions that it needs."""
_SERIAL = 2**17
"""Multiplications that a thread of its own does not pay for."""

# What the threads share, by its place in an array of words.
CONTEXT = ("qkv", "turns", "positions", "slots", "parts", "out", "num_heads", "num_kv", "row_tokens", "num_slots",
           "window", "scale")  # fmt: skip
_POINTERS = {"qkv", "turns", "positions", "slots", "parts", "out"}


def emit(head_dim: int) -> ir.Module:
    """The operator for heads of D dimensions, a multiple of 16; its entry is `attend`."""
    module = ir.Module(name=f"attention of {head_dim}")
    place, units = _place(module, head_dim), _units(module, head_dim)
    place.linkage = units.linkage = "external"  # `layer_operator` calls them too
    _entry(module, head_dim, place, units)
    return module


def _entry(module: ir.Module, head_dim: int, place: Value, units: Value) -> None:
    """(qkv, turns, positions, slots, parts, num_heads, scale, window) -> attended."""
    code, (stack, _, _) = function(module, "attend", [POINTER, I64, I64])
    code.function.linkage = "external"
    torch = Torch(code)
    tensors = [code.load(code.at(stack, i64(number), I64), typ=POINTER) for number in range(5)]
    given = dict(zip(CONTEXT, map(torch.pointer, tensors), strict=False))
    num_heads = code.read(stack, I64, i64(5))
    num_tokens = torch.size(tensors[0], 0)
    num_kv = code.sdiv(torch.size(tensors[4], 0), i64(2))
    out = torch.empty(num_tokens, code.mul(num_heads, i64(head_dim)))
    given |= {
        "out": torch.pointer(out), "num_heads": num_heads, "num_kv": num_kv,
        "row_tokens": torch.size(tensors[2], 1), "num_slots": torch.size(tensors[4], 1),
        "scale": code.read(stack, I64, i64(6)), "window": code.read(stack, I64, i64(7)),
    }  # fmt: skip
    words = code.slot(I64, len(CONTEXT))
    for number, name in enumerate(CONTEXT):
        code.store(given[name], code.at(words, i64(number), I64))
    heads = code.add(num_heads, code.mul(num_kv, i64(2)))
    code.intrinsic("torch_parallel_for", I32, i64(0), num_tokens, _grain(code, heads, i64(head_dim)), place, words)
    with code.loop(i64(0), num_tokens, 1, [i64(0)]) as values:
        values[1] = larger(code, values[1], code.read(given["positions"], I64, values[0]))
    queries = _queries_of_row(code, given)
    in_pass = smaller(code, queries, i64(QUERIES))
    cost = code.mul(i64(head_dim), code.add(code.mul(in_pass, i64(2)), i64(8)))
    grain = _grain(code, cost, code.add(values[1], i64(1)))
    code.intrinsic("torch_parallel_for", I32, i64(0), num_units(code, given, num_tokens), grain, units, words)
    for tensor in tensors:
        torch.free(tensor)
    code.store(out, stack)
    code.ret_void()


def num_units(code: Code, given: dict[str, Value], num_tokens: Value) -> Value:
    """How many key-value heads of rows there are, each with as many of its queries as are taken at a time."""
    num_rows = code.sdiv(num_tokens, given["row_tokens"])
    return code.mul(code.mul(num_rows, given["num_kv"]), _passes(code, _queries_of_row(code, given)))


def _grain(code: Code, cost: Value, times: Value) -> Value:
    """How many units of a cost a thread takes at least."""
    return code.add(code.sdiv(i64(_SERIAL), code.mul(cost, times)), i64(1))


def _queries_of_row(code: Code, given: dict[str, Value]) -> Value:
    """Queries of a row that one key-value head answers."""
    return code.mul(given["row_tokens"], code.sdiv(given["num_heads"], given["num_kv"]))


def _passes(code: Code, queries: Value) -> Value:
    return code.sdiv(code.add(queries, i64(QUERIES - 1)), i64(QUERIES))


def _given(code: Code, words: Value) -> dict[str, Value]:
    """Read the context."""
    places = {name: code.at(words, i64(place), I64) for place, name in enumerate(CONTEXT)}
    given = {name: code.load(place, typ=POINTER if name in _POINTERS else I64) for name, place in places.items()}
    return given | {"scale": code.fptrunc(code.bitcast(given["scale"], ir.DoubleType()), F32)}


def _place(module: ir.Module, head_dim: int) -> Value:
    """Turn and write the tokens from `begin` to `end`; turned queries wait where their results go."""
    code, (begin, end, words) = function(module, "place", [I64, I64, POINTER])
    given, dim = _given(code, words), i64(head_dim)
    num_heads, num_kv = given["num_heads"], given["num_kv"]
    scale, turned = code.splat(given["scale"]), code.add(num_heads, num_kv)
    with code.loop(begin, end, 1) as (token,):
        turns = code.at(given["turns"], code.mul(code.read(given["positions"], I64, token), dim), F32)
        slot = code.read(given["slots"], I64, token)
        x = code.at(given["qkv"], code.mul(code.mul(token, code.add(turned, num_kv)), dim), F32)
        with code.loop(i64(0), num_heads, 1) as (head,), code.loop(i64(0), dim, LANES) as (index,):
            place = code.add(code.mul(head, dim), index)
            first = code.mul(code.mul(token, num_heads), dim)
            vector = _turned(code, code.read(x, F32S, place), code.read(turns, F32S, index))
            code.write(code.fmul(vector, scale), given["out"], code.add(first, place))
        with code.loop(i64(0), num_kv, 1) as (head,), code.loop(i64(0), dim, LANES) as (index,):
            key, value = (
                code.read(x, F32S, code.add(code.mul(code.add(head, before), dim), index))
                for before in (num_heads, turned)
            )
            keys, values = (
                code.add(code.mul(code.add(code.mul(code.add(head, before), given["num_slots"]), slot), dim), index)
                for before in (i64(0), num_kv)
            )
            code.write(_turned(code, key, code.read(turns, F32S, index)), given["parts"], keys)
            code.write(value, given["parts"], values)
    code.ret_void()
    return code.function


def _units(module: ir.Module, head_dim: int) -> Value:
    """What one thread does: the units from `begin` to `end`."""
    unit = unit_of(module, head_dim)
    code, (begin, end, words) = function(module, "units", [I64, I64, POINTER])
    given, dim = _given(code, words), i64(head_dim)
    num_heads, num_kv, row_tokens = given["num_heads"], given["num_kv"], given["row_tokens"]
    group, queries = code.sdiv(num_heads, num_kv), _queries_of_row(code, given)
    passes = _passes(code, queries)
    pointers, positions = code.slot(POINTER, QUERIES), code.slot(I64, QUERIES)
    with code.loop(begin, end, 1) as (number,):
        head_of_row, first = code.sdiv(number, passes), code.mul(code.srem(number, passes), i64(QUERIES))
        row, head = code.sdiv(head_of_row, num_kv), code.srem(head_of_row, num_kv)
        count = smaller(code, code.sub(queries, first), i64(QUERIES))
        first_token = code.mul(row, row_tokens)
        with code.loop(i64(0), count, 1) as (query,):
            place = code.add(first, query)
            token = code.add(first_token, code.sdiv(place, group))
            own_head = code.add(code.mul(head, group), code.srem(place, group))
            at = code.mul(code.add(code.mul(token, num_heads), own_head), dim)
            code.write(code.at(given["out"], at, F32), pointers, query)
            code.write(code.read(given["positions"], I64, token), positions, query)
        first_slot = code.sub(code.read(given["slots"], I64, first_token),
                              code.read(given["positions"], I64, first_token))  # fmt: skip
        keys, values = (
            code.at(given["parts"], code.mul(code.add(code.mul(part, given["num_slots"]), first_slot), dim), F32)
            for part in (head, code.add(head, num_kv))
        )
        code.call(unit, [keys, values, pointers, positions, count, given["window"]])
    code.ret_void()
    return code.function


def _turned(code: Code, x: Value, turns: Value) -> Value:
    """Multiply pairs of numbers by pairs (cosine, sine), as complex numbers."""
    cosines, sines = (code.shuffle_vector(turns, turns, lane_numbers(lane // 2 * 2 + part for lane in range(LANES)))
                      for part in (0, 1))  # fmt: skip
    others = code.shuffle_vector(x, x, lane_numbers(lane ^ 1 for lane in range(LANES)))
    signs = ir.Constant(F32S, [f32(-1.0), f32(1.0)] * (LANES // 2))
    return code.fused(x, cosines, code.fmul(others, code.fmul(sines, signs)))
