"""Times the pieces of a run, on one rank and at the sizes that a plan needs: library calls, rule and messages.

Reads no checkpoint and runs no language model: matrices are random, and layers are so narrow that mainly the cost of
launching their operators is left. `tasks.calibrate` says what is measured when, and what it is used for.

Shapes: B sequences, T positions, V vocabulary, P = 2 uniforms of a draw.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp.cpu.tracing import Traced
from llama_ssp.kernels.attention import ALL, find_attention
from llama_ssp.kernels.linear import COMPILED, Linear, make_linear, product_of
from llama_ssp.machines.hardware import Speed
from llama_ssp.machines.profile import LinearPoint, RowsPoint, SizePoint
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.runner import Runner
from llama_ssp.planning.timing import MEASURED_SLOTS, OPERATORS_PER_LAYER, LinearTable
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.gpu import capture_stream, selected
from llama_ssp.run.calibration.interleave import undisturbed
from llama_ssp.run.calibration.model_pairs import HEAD_DIM, MLP_SHARE, RandomLlama
from llama_ssp.settings.formats import NO_QUANTIZATION, format_of
from llama_ssp.settings.schema import Dtype, SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.rules import Draft, Rule, make_rule
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable

ELEMENTS = tuple(4**power for power in range(6, 13))
ROWS = (1, 2, 5, 9, 64, 512)
OPERATOR_ROWS = (1, 5, 64)
WORKING_SETS = (4 * 2**20, 32 * 2**20, 192 * 2**20)
VOCABULARIES = (64, 4096, 32768)
MESSAGE_BYTES = (8, 1024, 8192, 65536, 524288)
BUDGET_S = 0.15
"""Time limit of one point."""
NARROW = 64
MANY_LAYERS = 9
MOST_MATRICES, NUM_CACHES = 512, 64
WIDTHS = (64, 256)
_FEWEST, _MOST = 3, 200
_SHORTEST_S = 2e-4
_NUM_DRAFT_TOKENS = 4
_NUM_OPERATORS = 200
_SPEED_SIDE = 2048

Call = Callable[[], object]


def seconds_per_call(call: Call, *, budget_s: float = BUDGET_S, between: Call | None = None) -> float:
    """Return the `undisturbed` time of a call, over as many calls as the budget allows.

    `between` is untimed work before each call, for code and data that would otherwise be warmer than in a run.
    """
    call()
    bunch, times = 1, list[float]()
    while len(times) < _FEWEST or (len(times) < _MOST and bunch * sum(times) < budget_s):
        if between:
            between()
        started = time.perf_counter()
        for _ in range(bunch):
            call()
        times.append((time.perf_counter() - started) / bunch)
        if not between and bunch == 1 and times[-1] < _SHORTEST_S / 2:
            # Short calls are timed in batches, since reading the clock costs as much as one call.
            bunch, times = int(_SHORTEST_S / max(times[-1], 1e-6)), []
    return undisturbed(times)


def _settled(call: Call, device: torch.device) -> Call:
    """Return a call that waits for the device."""

    def settled() -> None:
        call()
        torch.cuda.synchronize(device)

    return settled if device.type == "cuda" else call


def copy_bytes_per_s(device: torch.device, num_bytes: int = 2**28) -> float:
    """Bytes read and written per second by a copy too large for any cache."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(_settled(lambda: target.copy_(source), device))


@torch.inference_mode()
def cpu_speeds(num_bytes: int = 2**28) -> dict[str, Speed]:
    """The speeds of a CPU's products by layers that no cache holds, of one row and of a round's five.

    By storage format, if this CPU has our kernel, and by number format of unquantized weights.
    """
    speeds = dict[str, Speed]()
    side, few = _SPEED_SIDE, _NUM_DRAFT_TOKENS + 1
    num_weights = 2 * side**2
    for name in ("fp32", "fp16", *(name for name, kind in COMPILED.items() if product_of(kind))):
        quantization = name if name in COMPILED else NO_QUANTIZATION
        weight = torch.full((2 * side, side), 1 + 2**-20 if name == "fp32" else 1.0)  # fp16 does not hold the former
        layer = make_linear(weight, None, kernel=Precision(quantization=quantization).kernel)
        size = format_of(quantization).matrix_bytes(num_weights, 4 if name == "fp32" else 2)
        layers = [layer, *(deepcopy(layer) for _ in range(num_bytes // size))]
        one_s, few_s = (seconds_per_call(_in_turn(layers, torch.ones(rows, side))) for rows in (1, few))
        speeds[name] = Speed(bytes_per_s=size / one_s, flops_per_s=2 * few * num_weights / few_s)
    return speeds


def flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of a square matrix product, in FLOP/s."""
    side = 8192 if device.type == "cuda" else 1024
    left = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds_per_call(_settled(lambda: left @ left, device))


def launch_s(device: torch.device) -> float:
    """Time of one operator launched from Python: on a CPU of a few bytes, on a GPU of a layer of the lean decoder.

    Python's work between two operators is most of it there.
    """
    if device.type == "cuda":
        few_s, many_s = (_launched_s(device, num_layers) for num_layers in (1, MANY_LAYERS))
        return max(many_s - few_s, 1e-6) / (MANY_LAYERS - 1) / OPERATORS_PER_LAYER
    x = torch.zeros(64, device=device)

    def some() -> None:
        for _ in range(_NUM_OPERATORS):
            x.add_(1.0)

    return seconds_per_call(_settled(some, device)) / _NUM_OPERATORS


def _launched_s(device: torch.device, num_layers: int) -> float:
    """Time of a forward of one token in fp16, launched from Python."""
    with torch.inference_mode(), selected(device):
        runner = RandomLlama(WIDTHS[-1], num_layers, NARROW).load(Comm.single(), device=device, dtype=torch.float16)
        runner.allocate(batch_size=1, capacity=128)
        ids_B1, positions_B1 = torch.zeros(2, 1, 1, dtype=torch.int64, device=device).unbind()
        forward = partial(runner.forward, ids_B1, positions_B1, bucket=MEASURED_SLOTS)
        return seconds_per_call(_settled(forward, device))


def kernel_s(device: torch.device) -> float:
    """Time of one operator on a few bytes in a CUDA graph: norms and gates, as layers have them; on a CPU as launched.

    On an H200 torch's norm of 2048 numbers took 3.0 us, and a small kernel of a layer 2.4 on average.
    """
    if device.type != "cuda":
        return launch_s(device)
    row, gate = (torch.zeros(1, width, dtype=torch.float16, device=device) for width in (2048, 8192))

    def some() -> None:
        for _ in range(_NUM_OPERATORS // 2):
            functional.rms_norm(row, row.shape[1:])
            functional.silu(gate)

    with selected(device):
        some()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
            some()
        return seconds_per_call(_settled(graph.replay, device)) / _NUM_OPERATORS


@torch.inference_mode()
def linear_points(
    name: str,
    working_sets: Sequence[int],
    *,
    arithmetic: Dtype = Dtype.fp32,
    keeps_weight: bool = False,
    from_16_bits: bool = False,
    quantization: str = NO_QUANTIZATION,
    is_brief: bool = False,
) -> list[LinearPoint]:
    """Time linear layers of all sizes, with matrices that stay in a cache and with ones that do not.

    Half of the matrices are four times as tall as wide, the others four times as wide as tall, as in an MLP.

    Args:
        name: what the points call the number format or the storage format of the matrices.
        working_sets: bytes of all matrices that are read in turn.
        arithmetic: number format of inputs and sums.
        keeps_weight: the matrices are embeddings too, so they keep their layout.
        from_16_bits: the matrices come from a 16-bit checkpoint, and are stored in 16 bits.
        quantization: the storage format of the matrices.
        is_brief: time fewer sizes and numbers of inputs.
    """
    dtype, kernel = getattr(torch, arithmetic.value), Precision(quantization=quantization).kernel
    points = []
    for working_set in working_sets:
        for elements in ELEMENTS[2::2] if is_brief else ELEMENTS:
            size = format_of(quantization).matrix_bytes(elements, 2 if from_16_bits else dtype.itemsize)
            # Only large matrices make up a set that no cache can hold: small ones would be too many.
            if size > working_set or (working_set > WORKING_SETS[-1] and size * MOST_MATRICES < working_set):
                continue
            side, layers = math.isqrt(elements // 4), []
            for index in range(2 * min(max(1, working_set // size // 2), MOST_MATRICES // 2)):
                weight = torch.randn((4 * side, side) if index % 2 else (side, 4 * side))
                weight = (weight.bfloat16() if from_16_bits else weight).to(dtype)
                layers.append(make_linear(weight, None, kernel=kernel, keeps_weight=keeps_weight))
            for rows in (1, 2, 5, 64) if is_brief else ROWS:
                two = _in_turn(layers, *(torch.randn(rows, width).to(dtype) for width in (4 * side, side)))
                point = LinearPoint(
                    dtype=name, rows=rows, elements=elements, working_set_bytes=working_set,
                    s=seconds_per_call(two) / 2, arithmetic=arithmetic.name,
                )  # fmt: skip
                points.append(point)
    return points


def _in_turn(layers: list[Linear], *inputs: Tensor) -> Call:
    """Return products of the inputs, each with the next of the layers."""
    remaining = cycle(layers)
    return lambda: [next(remaining)(x) for x in inputs]


def operator_points(linear: list[LinearPoint]) -> tuple[list[RowsPoint], list[RowsPoint]]:
    """Time everything in a layer except its matrices, and everything in a forward except its layers and head.

    Measures stacks of one and of several layers, so narrow that operators cost as much as matrices, and subtracts the
    cost of the matrices as a plan would read it from `linear`. Between two forwards a token is drawn, as in a round.
    """
    layers, frames, between = [], [], _drawing(_rule(), torch.randn(1, VOCABULARIES[1]))
    for width in WIDTHS:
        few, many = _stack(width, 1), _stack(width, MANY_LAYERS)
        sizes = [2 * width * width, width * width, 2 * MLP_SHARE * width * width, MLP_SHARE * width * width]
        set_bytes = 4 * MANY_LAYERS * sum(sizes)
        for rows in OPERATOR_ROWS:
            few_s, many_s = _forward_s(few, rows, between), _forward_s(many, rows, between)
            layer_s = (many_s - few_s) / (MANY_LAYERS - 1)
            price = partial(LinearTable(linear).seconds, rows=rows, dtype=Dtype.fp32, working_set_bytes=set_bytes)
            matrices_s, head_s = sum(map(price, sizes)), price(NARROW * width)
            layers.append(RowsPoint(rows=rows, width=width, s=max(layer_s - matrices_s, 1e-6)))
            frames.append(RowsPoint(rows=rows, width=width, s=max(few_s - layer_s - head_s, 1e-6)))
    return layers, frames


def _stack(width: int, num_layers: int) -> Runner:
    runner = RandomLlama(width, num_layers, NARROW).load(Comm.single())
    runner.allocate(batch_size=1, capacity=128)
    return runner


def _forward(runner: Runner, rows: int) -> Call:
    """Return a forward of `rows` positions of one sequence, traced as those of a round are."""
    ids_BT, positions_BT = torch.zeros(1, rows, dtype=torch.int64), torch.arange(rows)[None]
    traced = Traced(partial(runner.forward, bucket=MEASURED_SLOTS), reads=(runner,))
    return partial(traced, 0, ids_BT, positions_BT, bucket=MEASURED_SLOTS, version=runner.num_allocations)


@torch.inference_mode()
def _forward_s(runner: Runner, rows: int, between: Call) -> float:
    return seconds_per_call(_forward(runner, rows), budget_s=3 * BUDGET_S, between=between)


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


@torch.inference_mode()
def _attend_s(rows: int, num_slots: int, num_heads: int) -> float:
    """Time attention as a forward in fp32 does it: the compiled operator, or torch's where there is none."""
    attention = find_attention(torch.device("cpu"), torch.float32, HEAD_DIM)
    if not attention:
        keys, values = torch.randn(2, 1, num_heads, num_slots, HEAD_DIM).unbind()
        queries, mask = torch.randn(1, num_heads, rows, HEAD_DIM), torch.zeros(1, 1, rows, num_slots)
        return seconds_per_call(partial(functional.scaled_dot_product_attention, queries, keys, values, attn_mask=mask))
    qkv, positions = torch.randn(rows, 3 * num_heads * HEAD_DIM), torch.arange(num_slots)[-rows:]
    turns = torch.ones(num_slots, 1, HEAD_DIM // 2, dtype=torch.complex64)
    # The layers of a model in turn: a run finds their keys and values in no cache of the processor.
    caches = cycle(torch.randn(NUM_CACHES, 2 * num_heads, num_slots, HEAD_DIM).unbind())
    place = turns, positions[None], positions

    def attend() -> object:
        return attention(qkv, *place, next(caches), positions[None], ALL, num_heads, 1.0, 0)

    return seconds_per_call(attend)


def _rule() -> Rule:
    return make_rule(SamplingConfig(), VerificationConfig())


def _drawing(rule: Rule, logits_BV: Tensor) -> Call:
    """Return a draw from these logits, traced as those of a round are."""
    traced = Traced(lambda logits_BV, uniforms_BP: rule.draw(logits_BV, uniforms_BP)[0], reads=(rule,))
    return partial(traced, 0, logits_BV, _draws().plain_BP)


def _verifying(rule: Rule, logits_BTV: Tensor) -> Call:
    """Return a traced verification, by these logits, of ids drawn from them."""
    ids_BK, probs_BTV = torch.zeros(1, _NUM_DRAFT_TOKENS, dtype=torch.int64), torch.softmax(logits_BTV, dim=-1)

    def verified(logits_BTV: Tensor, ids_BK: Tensor, probs_BTV: Tensor, *draws: Tensor) -> tuple[Tensor, ...]:
        return tuple(rule.verify(Draft(ids_BK, probs_BTV), rule.process(logits_BTV), draws=Draws(*draws)))

    return partial(Traced(verified, reads=(rule,)), 0, logits_BTV, ids_BK, probs_BTV, *_draws())


def _draws() -> Draws:
    table = UniformTable(_NUM_DRAFT_TOKENS, torch.device("cpu"))
    return table.split(table.uniforms(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)))


@torch.inference_mode()
def rule_points() -> tuple[list[SizePoint], list[SizePoint]]:
    """Time the rule after a forward, drawing one token and verifying K of them, by rows times vocabulary."""
    rule, between = _rule(), _forward(_stack(WIDTHS[-1], MANY_LAYERS), 1)
    drawing, verifying = [], []
    for vocab_size in VOCABULARIES:
        logits_BTV = torch.randn(1, _NUM_DRAFT_TOKENS + 1, vocab_size)
        draw, verify = _drawing(rule, logits_BTV[:, 0]), _verifying(rule, logits_BTV)
        drawing.append(SizePoint(size=vocab_size, s=seconds_per_call(draw, between=between)))
        verifying.append(SizePoint(size=logits_BTV.numel(), s=seconds_per_call(verify, between=between)))
    return drawing, verifying


def all_reduce_points(comm: Comm, device: torch.device) -> list[SizePoint]:
    """Time all-reduces by size, each after a layer's worth of matrices; all ranks must call this together.

    The matrices exceed the caches, as those of a model do: a message after them takes longer than one in a tight loop.
    """
    matrices = cycle([torch.randn(512, 1024, device=device) for _ in range(32)])
    x = torch.randn(1, 4, 1024, device=device)

    def work() -> None:
        functional.linear(x, next(matrices))

    work_s = seconds_per_call(work)
    # A neighbour disturbs cores, not GPUs; and waiting for a GPU after a few messages would take as long as they do.
    num_bunches = 1 if device.type == "cuda" else 20
    points = []
    for num_bytes in MESSAGE_BYTES:
        values = torch.zeros(max(num_bytes // 4, 1), device=device)
        for _ in range(20):
            comm.all_reduce(values)
        num_calls = (300 if num_bytes < 2**16 else 60) // num_bunches
        took_s = []
        for _ in range(num_bunches):
            started = time.perf_counter()
            for _ in range(num_calls):
                work()
                comm.all_reduce(values)
            if device.type == "cuda":
                comm.finish()
            took_s.append((time.perf_counter() - started) / num_calls)
        points.append(SizePoint(size=num_bytes, s=max(undisturbed(took_s) - work_s, 1e-6)))
    return points
