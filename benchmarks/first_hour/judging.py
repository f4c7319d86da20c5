"""Whether a kernel is right, held to fp64, and how long it takes over operands that no cache holds, as a graph."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.first_hour.step import Where, say
from llama_ssp.engine.executors import CudaRecorder

MOST = {torch.float16: 0.005, torch.bfloat16: 0.02, torch.float32: 1e-4}
"""The largest error, of the largest value."""
BEYOND_CACHES_BYTES = 2**28


def judge(
    name: str, pieces: Sequence[Callable[[], Tensor]], wanted: Tensor, where: Where, *, num_bytes: int = 0
) -> Iterator[str]:
    """Say the time of pieces of one kind and the first one's error; a fault if that is too large."""
    say(doing=name)
    try:
        found, seconds = timed(pieces, where)
    except RuntimeError as problem:
        yield f"{name}: {str(problem).strip().partition(chr(10))[0]}"
        return
    error = float((found.double() - wanted).abs().max() / wanted.abs().max())
    say(case=name, error=error, us=1e6 * seconds, gb_per_s=num_bytes / seconds / 1e9)
    if not error <= MOST[found.dtype]:  # NaN is a fault too
        yield f"{name}: off by {error:.2g} of the largest value, at most {MOST[found.dtype]:g}"


def timed(pieces: Sequence[Callable[[], Tensor]], where: Where, *, num_turns: int = 10) -> tuple[Tensor, float]:
    """What the first of several pieces gives, and the least seconds of one; on a GPU as a graph."""

    def run() -> Tensor:
        first, *_ = [piece() for piece in pieces]
        return first

    found, again = run(), run
    if where.is_gpu:
        found, again = CudaRecorder().record(run)  # type: ignore[assignment]
    seconds = []
    for _ in range(num_turns if where.is_gpu else 1):
        started = time.perf_counter()
        again()
        if where.is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return found, min(seconds) / len(pieces)


def copies(num_bytes: int, where: Where) -> int:
    """How many copies of an operand no cache holds."""
    return max(1, min(64, BEYOND_CACHES_BYTES // num_bytes)) if where.is_gpu else 1
