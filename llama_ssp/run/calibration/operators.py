"""Times the library calls that models consist of, on one rank and at the sizes that a plan needs.

Reads no checkpoint and runs no language model: matrices are random, and layers are so narrow that mainly the cost of
launching their operators is left. `tasks.calibrate` says what is measured when, and what it is used for.

Shapes: B sequences, T positions, V vocabulary, E width.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
from torch.nn import functional

from llama_ssp.kernels.attention import find_attention
from llama_ssp.kernels.linear import Linear, make_linear
from llama_ssp.machines.profile import LinearPoint, RowsPoint, SizePoint
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.planning.timing import MEASURED_SLOTS, LinearTable
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.gpu.devices import capture_stream, selected
from llama_ssp.run.calibration.interleave import undisturbed
from llama_ssp.run.calibration.random_llama import HEAD_DIM, MLP_SHARE, RandomLlama
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of
from llama_ssp.settings.schema import Dtype
from llama_ssp.speculate.engine.tracing import Traced

ELEMENTS = tuple(4**power for power in range(6, 13))
ROWS = (1, 2, 5, 9, 64, 512)
FEW_ELEMENTS, FEW_ROWS = ELEMENTS[2::2], (1, 2, 5, 64)
OPERATOR_ROWS = (1, 5, 64)
WORKING_SETS = (4 * 2**20, 32 * 2**20, 192 * 2**20)
BUDGET_S = 0.15
"""Time limit of one point."""
_FEWEST, _MOST = 3, 200
NARROW = 64
MANY_LAYERS = 9
MOST_MATRICES, NUM_CACHES = 512, 64
WIDTHS = (64, 256)


def seconds_per_call(
    call: Callable[[], object], *, budget_s: float = BUDGET_S, between: Callable[[], object] | None = None
) -> float:
    """Return the `undisturbed` time of a call, over as many calls as the budget allows.

    `between` is untimed work before each call, for code and data that would otherwise be warmer than in a run.
    """
    if between:
        return undisturbed(_times_apart(call, between, budget_s))
    call()
    started = time.perf_counter()
    call()
    once = max(time.perf_counter() - started, 1e-6)
    # Short calls are timed in batches, since reading the clock costs as much as one call.
    bunch = max(1, int(2e-4 / once))
    times = []
    for _ in range(max(_FEWEST, min(_MOST, int(budget_s / (once * bunch))))):
        started = time.perf_counter()
        for _ in range(bunch):
            call()
        times.append((time.perf_counter() - started) / bunch)
    return undisturbed(times)


def _times_apart(call: Callable[[], object], between: Callable[[], object], budget_s: float) -> list[float]:
    times: list[float] = []
    call()
    while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < budget_s):
        between()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return times


def _settled(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a call that waits for the device."""
    if device.type != "cuda":
        return call

    def settle() -> None:
        call()
        torch.cuda.synchronize(device)

    return settle


def copy_bytes_per_s(device: torch.device, num_bytes: int = 2**28) -> float:
    """Bytes read and written per second by a copy too large for any cache."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(_settled(lambda: target.copy_(source), device))


def flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of a square matrix product, in FLOP/s."""
    side = 8192 if device.type == "cuda" else 1024
    left = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds_per_call(_settled(lambda: left @ left, device))


def operator_s(device: torch.device, *, captured: bool) -> float:
    """Time of one operator on a few bytes, launched from Python or, on a GPU, inside a CUDA graph."""
    number = 200
    x = torch.zeros(64, device=device)

    def some() -> None:
        for _ in range(number):
            x.add_(1.0)

    if not captured or device.type != "cuda":
        return seconds_per_call(_settled(some, device)) / number
    with selected(device):
        some()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
            some()
        return seconds_per_call(_settled(graph.replay, device)) / number


def linear_points(
    dtype: torch.dtype,
    name: str,
    *,
    working_sets: Sequence[int] = WORKING_SETS,
    keeps_weight: bool = False,
    from_16_bits: bool = False,
    quantization: str = NO_QUANTIZATION,
    all_elements: Sequence[int] | None = None,
    all_rows: Sequence[int] = ROWS,
) -> list[LinearPoint]:
    """Time linear layers of all sizes, with matrices that stay in a cache and with ones that do not.

    Half of the matrices are four times as tall as wide, the others four times as wide as tall, as in an MLP.

    Args:
        dtype: number format of the arithmetic.
        name: what the points call it.
        working_sets: bytes of all matrices that are read in turn.
        keeps_weight: the matrices are embeddings too, so they keep their layout.
        from_16_bits: the matrices come from a 16-bit checkpoint, and are stored in 16 bits.
        quantization: the storage format of the matrices.
        all_elements: sizes of matrices; None for all.
        all_rows: numbers of inputs.
    """
    arithmetic = Dtype(str(dtype).removeprefix("torch.")).name
    points = []
    for working_set in working_sets:
        for elements in all_elements or ELEMENTS:
            value_bytes = 2 if from_16_bits else dtype.itemsize
            size = format_of(quantization).matrix_bytes(elements, value_bytes)
            # Only large matrices make up a set that no cache can hold: small ones would be too many.
            if size > working_set or (working_set > WORKING_SETS[-1] and size * MOST_MATRICES < working_set):
                continue
            make = partial(
                _linear,
                elements,
                dtype,
                keeps_weight=keeps_weight,
                from_16_bits=from_16_bits,
                quantization=quantization,
            )
            number = min(max(2, working_set // size), MOST_MATRICES)
            layers = [make(tall=bool(index % 2)) for index in range(number)]
            for rows in all_rows:
                point = LinearPoint(
                    dtype=name, rows=rows, elements=elements, working_set_bytes=working_set,
                    s=_linear_s(layers, rows, dtype), arithmetic=arithmetic,
                )  # fmt: skip
                points.append(point)
    return points


def _linear(
    elements: int, dtype: torch.dtype, *, tall: bool, keeps_weight: bool, from_16_bits: bool, quantization: str
) -> tuple[int, Linear]:
    """Make a linear layer as a model would have it; returns its number of inputs with it."""
    side = math.isqrt(elements // 4)
    sizes = (4 * side, side) if tall else (side, 4 * side)
    weight = torch.randn(sizes)
    weight = (weight.bfloat16() if from_16_bits else weight).to(dtype)
    kernel = Precision(quantization=quantization).kernel
    return sizes[1], make_linear(weight, None, kernel=kernel, keeps_weight=keeps_weight)


@torch.inference_mode()
def _linear_s(layers: list[tuple[int, Linear]], rows: int, dtype: torch.dtype) -> float:
    """Time one linear layer, averaged over layers that are read in turn."""
    inputs = {width: torch.randn(rows, width).to(dtype) for width, _ in layers}
    in_turn = cycle(layers)

    def two() -> None:
        for _ in range(2):  # a tall one and a wide one
            width, layer = next(in_turn)
            layer(inputs[width])

    return seconds_per_call(two) / 2


def operator_points(
    linear: list[LinearPoint], between: Callable[[], object]
) -> tuple[list[RowsPoint], list[RowsPoint]]:
    """Time everything in a layer except its matrices, and everything in a forward except its layers and head.

    Measures stacks of one and of several layers, so narrow that operators cost as much as matrices, and subtracts the
    cost of the matrices as a plan would read it from `linear`. `between` is what a round does between two forwards.
    """
    layers, frames = [], []
    for width in WIDTHS:
        few, many = _stack(width, 1), _stack(width, MANY_LAYERS)
        for rows in OPERATOR_ROWS:
            few_s, many_s = _forward_s(few, rows, between), _forward_s(many, rows, between)
            layer_s = (many_s - few_s) / (MANY_LAYERS - 1)
            price = partial(LinearTable(linear).seconds, rows=rows, dtype=Dtype.fp32)
            sizes = [2 * width * width, width * width, 2 * MLP_SHARE * width * width, MLP_SHARE * width * width]
            set_bytes = 4 * MANY_LAYERS * sum(sizes)
            matrices_s = sum(price(elements, working_set_bytes=set_bytes) for elements in sizes)
            head_s = price(NARROW * width, working_set_bytes=set_bytes)
            layers.append(RowsPoint(rows=rows, width=width, s=max(layer_s - matrices_s, 1e-6)))
            frames.append(RowsPoint(rows=rows, width=width, s=max(few_s - layer_s - head_s, 1e-6)))
    return layers, frames


def _stack(width: int, num_layers: int) -> Runner:
    runner = RandomLlama(width, num_layers, NARROW).load(Comm.single())
    runner.allocate(batch_size=1, capacity=128)
    return runner


def _forward(runner: Runner, rows: int) -> Callable[[], object]:
    """Return a forward of `rows` positions of one sequence, traced as those of a round are."""
    ids_BT, positions_BT = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)[None]
    traced = Traced(partial(runner.forward, bucket=MEASURED_SLOTS), reads=(runner,))
    return partial(traced, 0, ids_BT, positions_BT, bucket=MEASURED_SLOTS, version=runner.num_allocations)


@torch.inference_mode()
def _forward_s(runner: Runner, rows: int, between: Callable[[], object]) -> float:
    return seconds_per_call(_forward(runner, rows), budget_s=3 * BUDGET_S, between=between)


def some_forward() -> Callable[[], object]:
    """Return a forward of one position, as it precedes a rule."""
    return _forward(_stack(WIDTHS[-1], MANY_LAYERS), 1)


def beyond_caches() -> int:
    """Bytes that exceed every cache of this machine."""
    try:
        return max(2 * os.sysconf("SC_LEVEL3_CACHE_SIZE"), 2 * WORKING_SETS[-1])
    except (ValueError, OSError):  # only Linux reports cache sizes
        return 2 * WORKING_SETS[-1]


def attention_points() -> list[SizePoint]:
    """Seconds per byte of keys and values beyond the first few, by the number of rows that read it."""
    num_heads = 4
    few, many = MEASURED_SLOTS, 1024
    more_bytes = 2 * (many - few) * num_heads * HEAD_DIM * 4
    points = []
    for rows in OPERATOR_ROWS:
        more_s = _attend_s(rows, many, num_heads) - _attend_s(rows, few, num_heads)
        points.append(SizePoint(size=rows, s=max(more_s / more_bytes, 1e-15)))
    return points


def _attend_s(rows: int, num_slots: int, num_heads: int) -> float:
    """Time attention as a forward in fp32 does it: the compiled operator, or torch's where there is none."""
    cpu = torch.device("cpu")
    call: Callable[[], object]
    if attention := find_attention(cpu, torch.float32, HEAD_DIM):
        qkv, positions = torch.randn(rows, 3 * num_heads * HEAD_DIM), torch.arange(num_slots)[-rows:]
        turns = torch.ones(num_slots, 1, HEAD_DIM // 2, dtype=torch.complex64)
        # The layers of a model in turn: a run finds their keys and values in no cache of the processor.
        caches = cycle(torch.randn(NUM_CACHES, 2 * num_heads, num_slots, HEAD_DIM).unbind())

        def call() -> object:
            return attention(qkv, turns, positions[None], positions, next(caches), num_heads, 1.0, 0)

    else:
        keys, values = torch.randn(2, 1, num_heads, num_slots, HEAD_DIM).unbind()
        queries, mask = torch.randn(1, num_heads, rows, HEAD_DIM), torch.zeros(1, 1, rows, num_slots)
        call = partial(functional.scaled_dot_product_attention, queries, keys, values, attn_mask=mask)
    with torch.inference_mode():
        return seconds_per_call(call)
