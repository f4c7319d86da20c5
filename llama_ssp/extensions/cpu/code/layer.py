"""Whole layers as torch calls them: norm, queries, keys and values, attention, output, norm, gate and up, down.

    step     threads share                     reads            writes
    qkv      blocks of 16 outputs              x, normed        qkv
    place    tokens                            qkv              cache; turned queries to `attended`
    attend   key-value heads of rows           cache            attended
    output   blocks of 16 outputs              attended, x      middle
    gated    pairs of blocks                   middle, normed   gated
    down     blocks of 16 outputs              gated, middle    y, the x of the next layer

The steps run the functions of `linear` and `attention`, which the operators of a product and of attention run
too, so the bits are the same. Each thread norms and quantizes a few rows for itself; if there are more rows, threads
divide them, in a separate step before each product.

Threads share a step: each takes the next units until none is left, then waits for the others. libgomp needs some
microseconds to begin and to end a parallel region, and torch to call an operator, as much as a small product takes.
Here threads meet between the steps of one region, at counters in memory: each step of each layer has its own. No step
asks how many threads there are: one that comes late, or never, finds less to do. A thread that waits spins for most of
a millisecond, then sleeps in the kernel: the one that it waits for may have lost its core for longer, and a thread that
has slept gets a core back sooner than one that has spun. To sleep sooner costs more than it saves: a virtual machine
gives the core away, and rounds took a tenth longer.

Shapes: L layers of equal shapes, M tokens, E width, H query heads, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from llama_ssp.architectures.engine import LANES
from llama_ssp.extensions.cpu.code import attention as attending
from llama_ssp.extensions.cpu.code import linear
from llama_ssp.extensions.cpu.code.emit import (
    F32,
    I32,
    I64,
    INT64,
    NO_POINTER,
    POINTER,
    VOID,
    Code,
    Operator,
    Value,
    constant,
)
from llama_ssp.extensions.cpu.code.kinds import PARTS, PRODUCTS, TENSORS
from llama_ssp.storage.formats import Product

STEPS = "qkv", "place", "attend", "output", "gated", "down"
PREPARATIONS = tuple(f"{name} rows" for name in PRODUCTS)
_AT_ONCE = 8
"""Blocks of outputs that a thread takes at a time, as many as a product needs to hide the latency of a sum."""
_MOST_THREADS = 2**10
_MOST_ALONE = 16
"""The most rows that each thread prepares for itself: repeating the work takes less time than waiting for others."""

_OPERANDS = tuple(f"{name}_{part}" for name in PRODUCTS for part in PARTS)
"""Operands of a layer, in the order in which the operator gets them."""
_SIZES = "num_inputs", "num_outputs", "num_groups"
_CONTEXT = dict.fromkeys(
    ("counters", "attention", "spaces", "own", "x", "qkv", "attended", "middle", "gated", "y"), POINTER
)
_CONTEXT |= dict.fromkeys(
    ("num_layers", "space_bytes", "num_rows", "num_threads", "num_units", "least_qkv", "least_gated"), I64
)
_CONTEXT |= dict.fromkeys((f"{name}_{size}" for name in PRODUCTS for size in _SIZES), I64)
"""Words that the threads share; `own` are the addresses of each layer's cache and operands."""
_OF_LAYER = dict.fromkeys(("cache", *_OPERANDS), POINTER)
COUNTERS = 16
"""Words of a step: how many units are begun and, in another cache line, how many are done and who sleeps."""
_OF_STEPS = len(STEPS + PREPARATIONS) * COUNTERS
"""Words of the steps of a layer; after all layers there are as many again, of which the last meeting takes some."""
_LINE = 8
_SPINS = 2**16
"""Looks at the counter before a waiting thread sleeps, some 10 ns each."""
_FUTEX, _WAIT, _WAKE, _ALL = 202, 128, 129, 2**31 - 1
"""The system call of Linux on x86-64, its operations within one process, and how many to wake."""


def emit(product: Product, rows: str, head_dim: int) -> ir.Module:
    """The operator for products and cache rows of a kind each, and heads of D dimensions; its entry is `layers`."""
    module = ir.Module(name=f"layers of {product.kind}, {rows} and {head_dim}")
    kernels = {
        name: ir.Function(module, ir.FunctionType(VOID, [I64, I64, POINTER]), symbol)
        for name, symbol in (
            ("part", f"llama_ssp_product_{product.kind}_part"),
            ("place", f"llama_ssp_attention_{rows}_{head_dim}_place"),
            ("units", f"llama_ssp_attention_{rows}_{head_dim}_units"),
        )
    }
    _entry(module, head_dim, _steps(module, product, kernels))
    return module


def _entry(module: ir.Module, head_dim: int, steps: Value) -> None:
    """(tensors, caches, operands, least squares of both norms, heads, scale, window) -> y."""
    operator = Operator(module, "layers", num_tensors=len(TENSORS))
    code, tensors = operator.code, dict(zip(TENSORS, operator.tensors, strict=True))
    first = len(TENSORS)
    caches, operands = operator.list_of(first), operator.list_of(first + 1)
    least_qkv, least_gated, num_heads, scale, window = (operator.argument(first + place) for place in range(2, 7))
    given = {name: operator.pointer(tensor) for name, tensor in tensors.items()}
    num_layers, cache = operator.length(caches), operator.item(caches, 0)
    num_rows, width = operator.size(tensors["x"], 0), operator.size(tensors["x"], 1)
    num_kv, num_slots = code.sdiv(operator.size(cache, 0), 2), operator.size(cache, 1)
    attended_width = code.mul(num_heads, head_dim)
    for name in PRODUCTS:
        weights = operator.item(operands, _OPERANDS.index(f"{name}_weights"))
        given[f"{name}_num_outputs"] = code.mul(operator.size(weights, 0), LANES)
        given[f"{name}_num_groups"] = operator.size(weights, 1)
    gated_width = code.sdiv(given["gated_num_outputs"], 2)
    given |= {
        "qkv_num_inputs": width,
        "output_num_inputs": attended_width,
        "gated_num_inputs": width,
        "down_num_inputs": gated_width,
    }
    num_threads = _num_threads(code, given, num_rows)
    widest = code.larger(code.larger(width, attended_width), gated_width)
    space = code.mul(num_rows, code.add(code.mul(widest, 2), 2))
    y = operator.empty(num_rows, width)
    sizes = {"qkv": given["qkv_num_outputs"], "attended": attended_width, "middle": width, "gated": gated_width}
    total = start = code.mul(code.select(_shares_rows(code, num_rows), constant(I64, 1), num_threads), space)
    for size in sizes.values():
        total = code.add(total, code.mul(num_rows, size))
    given["spaces"] = operator.pointer(operator.empty(total))
    for name, size in sizes.items():
        given[name] = code.at(given["spaces"], start, F32)
        start = code.add(start, code.mul(num_rows, size))
    num_counters = code.mul(code.add(num_layers, 1), _OF_STEPS)
    num_words = code.add(num_counters, code.mul(num_layers, len(_OF_LAYER)))
    counters = operator.pointer(operator.empty(num_words, kind=INT64))
    with code.loop(0, num_counters, 1) as (place,):
        code.write(0, counters, place)
    own = code.at(counters, num_counters, I64)
    for found, number, behind in ((caches, 1, 0), (operands, len(_OPERANDS), 1)):
        with code.loop(0, operator.length(found), 1) as (place,):
            layer = code.mul(code.sdiv(place, number), len(_OF_LAYER))
            word = code.add(code.add(layer, code.srem(place, number)), behind)
            code.store(operator.pointer_or_none(operator.item(found, place)), code.at(own, word, I64))
    attention = given | {
        "parts": NO_POINTER,
        "out": given["attended"],
        "num_heads": num_heads,
        "num_kv": num_kv,
        "row_tokens": operator.size(tensors["positions"], 1),
        "num_slots": num_slots,
        "num_behind": operator.size(tensors["sees"], 2),
        "window": window,
        "scale": scale,
    }
    words = code.stored(
        _CONTEXT,
        given
        | {
            "counters": counters,
            "attention": code.stored(attending.CONTEXT, attention),
            "own": own,
            "num_layers": num_layers,
            "num_rows": num_rows,
            "space_bytes": code.select(_shares_rows(code, num_rows), constant(I64, 0), code.mul(space, 4)),
            "y": operator.pointer(y),
            "num_threads": num_threads,
            "least_qkv": least_qkv,
            "least_gated": least_gated,
            "num_units": attending.num_units(code, attention, num_rows),
        },
    )
    operator.share(num_threads, 1, steps, words)
    operator.give(y)


def _num_threads(code: Code, given: dict[str, Value], num_rows: Value) -> Value:
    """The number of threads: torch's, or fewer if there is little to do."""
    cost = 0
    for name in PRODUCTS:
        cost = code.add(cost, code.mul(given[f"{name}_num_inputs"], given[f"{name}_num_outputs"]))
    useful = code.add(code.sdiv(code.mul(cost, code.add(num_rows, 1)), linear.SERIAL), 1)
    there = code.slot(I32, 1)
    code.intrinsic("torch_get_num_threads", I32, there)
    return code.smaller(useful, code.smaller(code.zext(code.load(there, typ=I32), I64), _MOST_THREADS))


def _shares_rows(code: Code, num_rows: Value) -> Value:
    """Whether threads prepare rows together."""
    return code.icmp_signed(">", num_rows, _MOST_ALONE)


def _steps(module: ir.Module, product: Product, kernels: dict[str, Value]) -> Value:
    """All steps of a thread: (first thread, last thread, context), where a thread may stand for several."""
    code, (first, last, words) = Code.begin(module, "steps", [I64, I64, POINTER])
    given = code.loaded(_CONTEXT, words)
    of_attention = code.loaded(attending.CONTEXT, given["attention"])
    threads = code.at(given["counters"], code.mul(given["num_layers"], _OF_STEPS), I64)
    own = code.atomic_rmw("add", threads, constant(I64, 1), "monotonic")
    space = code.at(given["spaces"], code.mul(own, given["space_bytes"]))
    with code.loop(0, given["num_layers"], 1) as (number,):
        is_first = code.icmp_signed("==", number, 0)
        of_layer = code.loaded(_OF_LAYER, code.at(given["own"], code.mul(number, len(_OF_LAYER)), I64))
        here = given | of_layer | {"x": code.select(is_first, given["x"], given["y"])}
        start = code.mul(number, _OF_STEPS)
        counters = {
            name: code.at(given["counters"], code.add(start, place * COUNTERS), I64)
            for place, name in enumerate(STEPS + PREPARATIONS)
        }
        attention = code.stored(attending.CONTEXT, of_attention | {"parts": of_layer["cache"]})
        _layer(code, product, kernels, here | {"attention": attention, "space": space}, counters)
    # The caller meets the others here: in libgomp it would spin for milliseconds on a core that one of them may need.
    finish(code, threads, code.sub(last, first), given["num_threads"])
    with code.if_then(code.icmp_signed("==", first, 0)):
        wait(code, threads, given["num_threads"])
    return code.end()


def _layer(
    code: Code, product: Product, kernels: dict[str, Value], given: dict[str, Value], counters: dict[str, Value]
) -> None:
    """The steps of one layer."""

    def multiply(name: str, x: str, y: str, residual: Value = NO_POINTER) -> None:
        """Write one product; each thread prepares the rows for itself, or all threads divide them."""
        gates, no_square = (constant(I64, number) for number in (int(name == "gated"), 0))
        needs = {part: given[f"{name}_{part}"] for part in (*PARTS, *_SIZES)}
        needs |= {
            "x": given[x],
            "y": given[y],
            "residual": residual,
            "gates": gates,
            "space": given["space"],
            "num_rows": given["num_rows"],
            "least_square": given.get(f"least_{name}", no_square),
        }
        with code.if_else(_shares_rows(code, given["num_rows"])) as (together, alone):
            with together, units(code, counters[f"{name} rows"], given["num_rows"], constant(I64, 1)) as (begin, end):
                linear.prepared(code, product, needs, begin, end)
            with alone:
                linear.prepared(code, product, needs, 0, given["num_rows"])
        shared = code.stored(linear.CONTEXT, needs | linear.prepared(code, product, needs, 0, 0))
        of_unit = code.add(gates, 1)
        count = code.sdiv(needs["num_outputs"], code.mul(of_unit, LANES))
        fair = code.sdiv(code.add(count, code.sub(given["num_threads"], 1)), given["num_threads"])
        grain = code.smaller(fair, code.sdiv(_AT_ONCE, of_unit))
        with units(code, counters[name], count, grain) as (begin, end):
            code.call(kernels["part"], [begin, end, shared])

    multiply("qkv", "x", "qkv")
    for step, kernel, count in (("place", "place", "num_rows"), ("attend", "units", "num_units")):
        with units(code, counters[step], given[count], constant(I64, 1)) as (begin, end):
            code.call(kernels[kernel], [begin, end, given["attention"]])
    multiply("output", "attended", "middle", given["x"])
    multiply("gated", "middle", "gated")
    multiply("down", "gated", "y", given["middle"])


@contextmanager
def units(code: Code, counters: Value, count: Value, grain: Value) -> Iterator[tuple[Value, Value]]:
    """Run the body for ranges of units (first, end) until none is left, then wait until all threads' units are done."""
    head, body, after = (code.append_basic_block(name) for name in ("take", "work", "wait"))
    code.branch(head)
    code.position_at_end(head)
    begin = code.atomic_rmw("add", counters, grain, "monotonic")
    code.cbranch(code.icmp_signed("<", begin, count), body, after)
    code.position_at_end(body)
    end = code.smaller(code.add(begin, grain), count)
    yield begin, end
    finish(code, counters, code.sub(end, begin), count)
    code.branch(head)
    code.position_at_end(after)
    wait(code, counters, count)


def finish(code: Code, counters: Value, number: Value, count: Value) -> None:
    """Add to the units that are done; the last ones wake the threads that sleep."""
    done = code.at(counters, _LINE, I64)
    sleepers = code.at(counters, _LINE + 1, I64)
    before = code.atomic_rmw("add", done, number, "seq_cst")
    is_last = code.icmp_signed(">=", code.add(before, number), count)
    with code.if_then(is_last):
        someone = code.icmp_signed(">", code.load_atomic(sleepers, "seq_cst", 8, typ=I64), 0)
        with code.if_then(someone):
            _futex(code, done, _WAKE, constant(I32, _ALL))


def wait(code: Code, counters: Value, count: Value) -> None:
    """Return once `count` units are done."""
    done = code.at(counters, _LINE, I64)
    sleepers = code.at(counters, _LINE + 1, I64)
    before = code.block
    head, body, after = (code.append_basic_block(name) for name in ("look", "pause", "met"))
    code.branch(head)
    code.position_at_end(head)
    spins = code.phi(I64)
    spins.add_incoming(constant(I64, 0), before)
    found = code.load_atomic(done, "acquire", 8, typ=I64)
    code.cbranch(code.icmp_signed("<", found, count), body, after)
    code.position_at_end(body)
    code.intrinsic("llvm.x86.sse2.pause", VOID)
    more = code.add(spins, 1)
    with code.if_then(code.icmp_signed(">=", more, _SPINS)):
        code.atomic_rmw("add", sleepers, constant(I64, 1), "seq_cst")
        again = code.load_atomic(done, "seq_cst", 8, typ=I64)
        with code.if_then(code.icmp_signed("<", again, count)):
            _futex(code, done, _WAIT, code.trunc(again, I32))  # returns at once if the counter has moved
        code.atomic_rmw("sub", sleepers, constant(I64, 1), "seq_cst")
    spins.add_incoming(more, code.block)
    code.branch(head)
    code.position_at_end(after)


def _futex(code: Code, word: Value, operation: int, number: Value) -> None:
    """Sleep while the lower half of a word is `number`, or wake `number` threads that sleep on it."""
    form = ir.FunctionType(I64, [I64], var_arg=True)
    found = code.module.globals.get("syscall") or ir.Function(code.module, form, "syscall")
    code.call(found, [_FUTEX, word, constant(I32, operation), number, NO_POINTER])
