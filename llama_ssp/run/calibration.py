"""Times candidates in turns on a shared machine, the bandwidth of a device, and the speeds of a CPU's products.

The first run on a CPU measures its products. `task=calibrate` measures more (`extensions.calibrate`).

On a shared machine a single time means little: candidates that are compared run in turns in every repetition. Report a
median over repetitions, or the median of ratios within them.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import cycle

import torch
from torch import Tensor

from llama_ssp.kernels.linear import Linear, make_linear
from llama_ssp.kernels.parts import Heads, KeptRows
from llama_ssp.machines.hardware import ATTENTION, Speed
from llama_ssp.models.cache import StaticCache
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.ranks.world import World, on_all_cores
from llama_ssp.registry import operators
from llama_ssp.storage.formats import NO_QUANTIZATION, format_of, formats

BUDGET_S = 0.15
"""Time limit of one measurement."""
_FEWEST, _MOST = 3, 200
_SHORTEST_S = 2e-4
_SPEED_SIDE, _PROMPT_ROWS = 2048, 64
_SOME_ROWS = 32
"""Rows with which products in all formats compute; five rows of fp32 take as long as reading its weights."""
_CACHED_LAYERS = 4

Call = Callable[[], object]


def interleave(
    candidates: Mapping[str, Callable[[int], float]], *, num_repetitions: int, num_warmup: int = 1
) -> dict[str, list[float]]:
    """Run all candidates in every repetition; returns the measurements of each candidate, in order.

    Every second repetition runs them backwards, so that no candidate always follows the one that empties the
    processor's caches. A candidate is called with the number of the repetition. The first `num_warmup` repetitions have
    negative numbers, and their measurements are discarded.
    """
    measured: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-num_warmup, num_repetitions):
        for name in [*candidates][:: -1 if repetition % 2 else 1]:
            value = candidates[name](repetition)
            if repetition >= 0:
                measured[name].append(value)
    return measured


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: other programs only ever add time, and the quartile excludes most of it."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of measurements taken in the same repetition."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def seconds_per_call(call: Call, device: torch.device | None = None) -> float:
    """Return the `undisturbed` time of a call, over as many calls as `BUDGET_S` allows; each call waits for the GPU."""

    def mean_s(number: int) -> float:
        started = time.perf_counter()
        for _ in range(number):
            call()
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / number

    mean_s(1)
    bunch, times = 1, list[float]()
    while len(times) < _FEWEST or (len(times) < _MOST and bunch * sum(times) < BUDGET_S):
        times.append(mean_s(bunch))
        if bunch == 1 and times[-1] < _SHORTEST_S / 2:
            # Short calls are timed in batches, since reading the clock costs as much as one call.
            bunch, times = int(_SHORTEST_S / max(times[-1], 1e-6)), []
    return undisturbed(times)


def copy_bytes_per_s(device: torch.device, num_bytes: int = 2**28) -> float:
    """Bytes read and written per second by a copy too large for any cache."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(lambda: target.copy_(source), device)


@torch.inference_mode()
def cpu_speeds(num_bytes: int = 2**28) -> dict[str, Speed]:
    """Measure a CPU's matrix products with weights too large for any cache, for one row and for several.

    Returns:
        Speeds (bytes from one row, operations from several) by number format of unquantized weights, by storage format
        if this CPU has our kernel, and of attention if this CPU has the operator. A storage format that only files have
        gets the speed of the measured format whose bits per weight are closest.
    """
    speeds = dict[str, Speed]()
    compiled = [record for record in formats().values() if operators.made("packed_block", "cpu", record)]
    measured = {record.name: record for record in compiled if not record.is_stored_alone}
    side, some = _SPEED_SIDE, _SOME_ROWS
    num_weights = 2 * side**2
    for name in ("fp32", "fp16", *measured):
        quantization = name if name in measured else NO_QUANTIZATION
        weight = torch.full((2 * side, side), 1 + 2**-20 if name == "fp32" else 1.0)  # fp16 does not hold the former
        layer = make_linear(weight, None, kernel=Precision(quantization=quantization).kernel)
        size = format_of(quantization).packing.matrix_bytes(num_weights, 4 if name == "fp32" else 2)
        layers = [layer, *(deepcopy(layer) for _ in range(num_bytes // size))]
        one_s, some_s = (seconds_per_call(_in_turn(layers, torch.ones(rows, side))) for rows in (1, some))
        speeds[name] = Speed(bytes_per_s=size / one_s, flops_per_s=2 * some * num_weights / some_s)
    for record in compiled if measured else ():
        own_bytes = record.packing.weight_bytes or 0
        bits = {name: abs((other.packing.weight_bytes or 0) - own_bytes) for name, other in measured.items()}
        speeds.setdefault(record.name, speeds[min(bits, key=bits.__getitem__)])
    return speeds | _attention_speed(num_bytes)


def _attention_speed(num_bytes: int) -> dict[str, Speed]:
    """Measure the speed of attention to keys and values that no cache holds: bytes read, and operations for each query.

    Two calls are timed: one token, and a part of a prompt with several queries.
    """
    num_heads, head_dim, kept = 32, 128, KeptRows(torch.float32)
    heads = Heads(num_heads, num_heads, head_dim, 1.0)
    attention = operators.made("attention", "cpu", kept.dtype, head_dim, kept)
    if attention is None:
        return {}
    slot_bytes = 2 * num_heads * head_dim * kept.dtype.itemsize
    num_slots = max(num_bytes // (_CACHED_LAYERS * slot_bytes), 2 * _PROMPT_ROWS)
    cache = StaticCache(
        num_layers=_CACHED_LAYERS, batch_size=1, capacity=num_slots, device=torch.device("cpu"), kept=kept
    )
    turns_S1P = torch.ones(num_slots, 1, head_dim // 2, dtype=torch.complex64)

    def seconds(num_tokens: int) -> float:
        positions_1T = torch.arange(num_slots - num_tokens, num_slots)[None]
        view = cache.view(positions_1T, bucket=num_slots, cache_rows_B=None)
        of_windows = attention.of_forward(turns_S1P, positions_1T, view, tree=None, seen_BT=None, windows=[None])
        qkv_MO, layers = torch.ones(num_tokens, 3 * num_heads * head_dim), cycle(range(_CACHED_LAYERS))
        return seconds_per_call(lambda: of_windows[None](qkv_MO, next(layers), heads, ()))

    one_s, of_query = seconds(1), 4 * num_slots * num_heads * head_dim
    query_s = max((seconds(_PROMPT_ROWS) - one_s) / (_PROMPT_ROWS - 1), one_s / _PROMPT_ROWS)
    reading_s = max(one_s - query_s, one_s / 2)
    return {ATTENTION: Speed(bytes_per_s=num_slots * slot_bytes / reading_s, flops_per_s=of_query / query_s)}


def _in_turn(layers: list[Linear], x: Tensor) -> Call:
    """Return a call that multiplies the input by one layer after the other, over and over."""
    remaining = cycle(layers)
    return lambda: next(remaining)(x)


@contextmanager
def rank_0_alone(world: World) -> Iterator[bool]:
    """Give rank 0 all cores for the length of the block, while the other ranks wait for its end.

    Yields whether this rank is rank 0. On a CPU, rank 0 computes with the cores and threads of a run of one rank.
    """
    is_alone, threads = world.comm.rank == 0, torch.get_num_threads()
    if is_alone and world.device.type == "cpu" and world.comm.size > 1:
        try:
            with on_all_cores(world.cores):
                torch.set_num_threads(len(world.cores))
                yield is_alone
        finally:
            torch.set_num_threads(threads)
    else:
        yield is_alone
    world.comm.barrier()
