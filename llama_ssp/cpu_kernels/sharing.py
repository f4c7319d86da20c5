"""How threads share the steps of one operator: each takes the next units until none is left, then waits for the others.

libgomp needs some microseconds to begin and to end a parallel region, as much as a small product takes. Here threads
meet between the steps of one region, at counters in memory. No step asks how many threads there are: one that comes
late, or never, finds less to do. A thread that waits spins, and gives its core away now and then, since the one that it
waits for may need it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from llama_ssp.cpu_kernels.attention_kernel import smaller
from llama_ssp.cpu_kernels.emit import I32, I64, VOID, Code, Value, i64

COUNTERS = 16
"""Words of a step: how many units are taken, and in another line of the cache, how many are done."""
_LINE = 8
_SPINS = 1024
"""Looks at the counter before a waiting thread gives its core away."""


@contextmanager
def units(code: Code, counters: Value, count: Value, grain: Value) -> Iterator[tuple[Value, Value]]:
    """The body is run for units from the first number to the second; after it all threads' units are done."""
    done = code.at(counters, i64(_LINE), I64)
    head, body, after = (code.append_basic_block(name) for name in ("take", "work", "wait"))
    code.branch(head)
    code.position_at_end(head)
    begin = code.atomic_rmw("add", counters, grain, "monotonic")
    code.cbranch(code.icmp_signed("<", begin, count), body, after)
    code.position_at_end(body)
    end = smaller(code, code.add(begin, grain), count)
    yield begin, end
    code.atomic_rmw("add", done, code.sub(end, begin), "release")
    code.branch(head)
    code.position_at_end(after)
    _wait(code, done, count)


def _wait(code: Code, done: Value, count: Value) -> None:
    before = code.block
    head, body, after = (code.append_basic_block(name) for name in ("look", "pause", "met"))
    code.branch(head)
    code.position_at_end(head)
    spins = code.phi(I64)
    spins.add_incoming(i64(0), before)
    found = code.load_atomic(done, "acquire", 8, typ=I64)
    code.cbranch(code.icmp_signed("<", found, count), body, after)
    code.position_at_end(body)
    code.intrinsic("llvm.x86.sse2.pause", VOID)
    more = code.add(spins, i64(1))
    with code.if_then(code.icmp_unsigned("==", code.and_(more, i64(_SPINS - 1)), i64(0))):
        code.intrinsic("sched_yield", I32)
    spins.add_incoming(more, code.block)
    code.branch(head)
    code.position_at_end(after)
