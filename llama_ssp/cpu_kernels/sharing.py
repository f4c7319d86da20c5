"""How threads share the steps of one operator: each takes the next units until none is left, then waits for the others.

libgomp needs some microseconds to begin and to end a parallel region, as much as a small product takes. Here threads
meet between the steps of one region, at counters in memory. No step asks how many threads there are: one that comes
late, or never, finds less to do. A thread that waits spins for some microseconds, then sleeps in the kernel: the one
that it waits for may need its core, and a thread that has slept gets a core back sooner than one that has spun.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from llama_ssp.cpu_kernels.attention_kernel import smaller
from llama_ssp.cpu_kernels.emit import I32, I64, POINTER, VOID, Code, Value, i64

COUNTERS = 16
"""Words of a step: how many units are taken, and in another line of the cache, how many are done and who sleeps."""
_LINE = 8
_SPINS = 4096
"""Looks at the counter before a waiting thread sleeps, some 10 ns each."""
_FUTEX, _WAIT, _WAKE, _ALL = 202, 128, 129, 2**31 - 1
"""The system call of Linux on x86-64, its operations within one process, and how many to wake."""


@contextmanager
def units(code: Code, counters: Value, count: Value, grain: Value) -> Iterator[tuple[Value, Value]]:
    """The body is run for units from the first number to the second; after it all threads' units are done."""
    head, body, after = (code.append_basic_block(name) for name in ("take", "work", "wait"))
    code.branch(head)
    code.position_at_end(head)
    begin = code.atomic_rmw("add", counters, grain, "monotonic")
    code.cbranch(code.icmp_signed("<", begin, count), body, after)
    code.position_at_end(body)
    end = smaller(code, code.add(begin, grain), count)
    yield begin, end
    finish(code, counters, code.sub(end, begin), count)
    code.branch(head)
    code.position_at_end(after)
    wait(code, counters, count)


def finish(code: Code, counters: Value, number: Value, count: Value) -> None:
    """Add to the units that are done; the last ones wake the threads that sleep."""
    done = code.at(counters, i64(_LINE), I64)
    sleepers = code.at(counters, i64(_LINE + 1), I64)
    before = code.atomic_rmw("add", done, number, "seq_cst")
    is_last = code.icmp_signed(">=", code.add(before, number), count)
    with code.if_then(is_last):
        someone = code.icmp_signed(">", code.load_atomic(sleepers, "seq_cst", 8, typ=I64), i64(0))
        with code.if_then(someone):
            _futex(code, done, _WAKE, ir.Constant(I32, _ALL))


def wait(code: Code, counters: Value, count: Value) -> None:
    """Return once so many units are done."""
    done = code.at(counters, i64(_LINE), I64)
    sleepers = code.at(counters, i64(_LINE + 1), I64)
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
    with code.if_then(code.icmp_signed(">=", more, i64(_SPINS))):
        code.atomic_rmw("add", sleepers, i64(1), "seq_cst")
        again = code.load_atomic(done, "seq_cst", 8, typ=I64)
        with code.if_then(code.icmp_signed("<", again, count)):
            _futex(code, done, _WAIT, code.trunc(again, I32))  # returns at once if the counter has moved
        code.atomic_rmw("sub", sleepers, i64(1), "seq_cst")
    spins.add_incoming(more, code.block)
    code.branch(head)
    code.position_at_end(after)


def _futex(code: Code, word: Value, operation: int, number: Value) -> None:
    """Sleep while the lower half of a word is `number`, or wake so many that sleep on it."""
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    found = code.module.globals.get("syscall") or ir.Function(code.module, kind, "syscall")
    none = ir.Constant(POINTER, None)
    code.call(found, [i64(_FUTEX), word, ir.Constant(I32, operation), number, none])
