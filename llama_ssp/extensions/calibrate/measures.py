"""Measures matrix rates, the times of a launch and of a kernel, and sums over ranks and nodes."""

import time
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from llama_ssp import catalogue
from llama_ssp.architectures.engine import OWN_SUM_BYTES
from llama_ssp.machines.hardware import Link, MeasuredSum
from llama_ssp.models.loading import load_model
from llama_ssp.models.weights import Loading
from llama_ssp.planning.forwards import OPERATORS_PER_LAYER
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.gpu import capture_stream, selected
from llama_ssp.run.calibration import Call, seconds_per_call, undisturbed
from llama_ssp.weights import hub
from llama_ssp.weights.checkpoint import inspect

MESSAGE_BYTES = (8, 1024, 8192, 65536, 524288)
_NUM_OPERATORS, _NUM_SUMS, _NUM_BUNCHES = 200, 20, 20


def flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the rate of a square matrix product, in FLOP/s."""
    side = 8192 if device.type == "cuda" else 1024
    left = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds_per_call(lambda: left @ left, device)


def launch_s(device: torch.device) -> float:
    """Measure the seconds of one operator that Python launches.

    On a CPU the operator computes a few bytes. On a GPU it is the mean of a layer of `tiny`, most of whose time is
    Python's work between two operators.
    """
    if device.type == "cuda":
        return _layer_s(device) / OPERATORS_PER_LAYER
    x = torch.zeros(64, device=device)

    def some() -> None:
        for _ in range(_NUM_OPERATORS):
            x.add_(1.0)

    return seconds_per_call(some) / _NUM_OPERATORS


@torch.inference_mode()
def _layer_s(device: torch.device) -> float:
    """Measure the seconds of a decoder layer of the shipped model in fp16, launched from Python."""
    with selected(device):
        origin = inspect(hub.resolve(catalogue.load("tiny")))
        runner = load_model(Loading(origin, dtype=torch.float16, device=device))
        runner.allocate(batch_size=1, capacity=128)
        ids_B1, positions_B1 = torch.zeros(2, 1, 1, dtype=torch.int64, device=device).unbind()
        forward = partial(runner.forward, ids_B1, positions_B1, bucket=128)
        return seconds_per_call(forward, device) / origin.shape.num_hidden_layers


def kernel_s(device: torch.device) -> float:
    """Measure the seconds of one operator on a few bytes in a CUDA graph, such as a layer's norms and gates.

    On a CPU this is `launch_s`. On an H200, torch's norm of 2048 numbers took 3.0 us, and a small kernel of a layer
    2.4 us on average.
    """
    if device.type != "cuda":
        return launch_s(device)
    hidden, gate = (torch.zeros(1, width, dtype=torch.float16, device=device) for width in (2048, 8192))

    def some() -> None:
        for _ in range(_NUM_OPERATORS // 2):
            functional.rms_norm(hidden, hidden.shape[1:])
            functional.silu(gate)

    with selected(device):
        return seconds_per_call(_captured(some), device) / _NUM_OPERATORS


def _captured(call: Call, times: int = 1) -> Call:
    """Make a call, and capture it `times` times in a CUDA graph; returns the graph's replay."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream(), capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return graph.replay


def sums(comm: Comm, device: torch.device, *, num_local: int, is_own: bool = False) -> list[MeasuredSum]:
    """Time all-reduces of 2, 4, ... and of all ranks of a node by size, as rounds run them; all ranks call this.

    Sums follow matrix products, as in a layer, since a message takes longer then than in a tight loop. On a GPU both
    are captured; with `is_own` the program's own kernel sums where it can.
    """
    found = []
    for number in sorted({size for size in (2, 4, 8) if size < num_local} | ({num_local} - {1})):
        group = comm.subgroup(tuple(range(number)))
        if group and is_own:
            group = group.with_peers()
        for num_bytes in MESSAGE_BYTES if group and bool(group.peers) is is_own else ():
            if num_bytes <= OWN_SUM_BYTES or not is_own:
                assert group
                seconds = _sum_s(group, num_bytes, device)
                found.append(MeasuredSum(num_ranks=number, num_bytes=num_bytes, s=seconds))
        comm.barrier()
    return found


def network(comm: Comm, device: torch.device, *, num_local: int) -> Link | None:
    """Time sums of few and of many bytes over the first ranks of two nodes; None on one node. All ranks call this."""
    if comm.size == num_local:
        return None
    found, group = None, comm.subgroup((0, num_local))
    if group:
        few_s, many_s = (_sum_s(group, size, device) for size in (MESSAGE_BYTES[0], MESSAGE_BYTES[-1]))
        found = Link(bandwidth_bytes_per_s=MESSAGE_BYTES[-1] / max(many_s - few_s, 1e-9), latency_s=few_s)
    comm.barrier()
    return found


def _sum_s(comm: Comm, num_bytes: int, device: torch.device) -> float:
    values = torch.zeros(max(num_bytes // 4, 1), device=device)
    return max((_captured_s if device.type == "cuda" else _summed_s)(comm, values), 1e-6)


@torch.inference_mode()
def _captured_s(comm: Comm, values: Tensor) -> float:
    """Return the seconds that an all-reduce takes when it follows a matrix product in a CUDA graph.

    This is the difference between a graph with both and a graph with the product alone.
    """
    x, weight = (torch.zeros(rows, 4096, dtype=torch.float16, device=values.device) for rows in (1, 4096))

    def product() -> None:
        functional.linear(x, weight)

    def both() -> None:
        product()
        comm.all_reduce(values)

    def replayed_s(call: Call) -> float:
        replay, took_s = _captured(call, times=_NUM_SUMS), []
        for _ in range(_NUM_BUNCHES):
            started = time.perf_counter()
            replay()
            comm.finish()
            took_s.append((time.perf_counter() - started) / _NUM_SUMS)
        return undisturbed(took_s)

    with selected(values.device):
        return replayed_s(both) - replayed_s(product)


def _summed_s(comm: Comm, values: Tensor) -> float:
    """Measure the seconds of an all-reduce that follows the matrix products of a layer, without those products."""
    matrices = cycle([torch.randn(512, 1024) for _ in range(32)])
    x = torch.randn(1, 4, 1024)

    def work() -> None:
        functional.linear(x, next(matrices))

    work_s, took_s = seconds_per_call(work), []
    for _ in range(_NUM_BUNCHES):
        started = time.perf_counter()
        for _ in range(_NUM_SUMS):
            work()
            comm.all_reduce(values)
        took_s.append((time.perf_counter() - started) / _NUM_SUMS)
    return undisturbed(took_s[1:]) - work_s
