"""Sums of all GPUs: `torchrun --nproc-per-node N -m benchmarks.first_hour.messages`.

Small all-reduces as a decoding step has them: from Python and captured.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.first_hour.step import say
from llama_ssp.config.schema import DeviceKind
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.world import World, start
from llama_ssp.engine.executors import CudaRecorder

SIZES_KIB = (8, 16, 64)
NUM_SUMS, NUM_TURNS = 20, 10


def faults(world: World) -> Iterator[str]:
    """Say the times of all kinds; a fault for each sum that is wrong."""
    comm = world.comm
    for kib in SIZES_KIB:
        for how, us, found in _measured(comm, torch.zeros(1, kib * 512, dtype=torch.float16, device=world.device)):
            if comm.rank == 0:
                say(kib=kib, how=how, us=us)
            if bool((found != comm.size * (comm.size + 1) // 2).any()):
                yield f"rank {comm.rank}: a sum of {kib} KiB is wrong, {how}"


def _measured(comm: Comm, values: Tensor) -> Iterator[tuple[str, float, Tensor]]:
    """How, microseconds of a sum, and the sum of all ranks' own numbers, counted from 1."""

    def own() -> Tensor:
        return comm.all_reduce(values.fill_(comm.rank + 1))

    def many() -> Tensor:
        values.zero_()
        for _ in range(NUM_SUMS):
            comm.all_reduce(values)
        return values

    yield "eager", _us(many, comm), own().clone()
    if values.is_cuda:
        record = CudaRecorder(finish=comm.finish).record
        (_, replay_many), (summed, replay) = record(many), record(own)
        took_us = _us(replay_many, comm)
        replay()
        yield "captured", took_us, summed.clone()


def _us(call: Callable[[], object], comm: Comm) -> float:
    """The least time of one of the sums of a call."""
    times = []
    for _ in range(1 + NUM_TURNS):
        comm.barrier()
        started = time.perf_counter()
        call()
        if comm.device.type == "cuda":
            comm.finish()
        times.append(time.perf_counter() - started)
    return 1e6 * min(times) / NUM_SUMS


def main() -> None:
    """Measure on as many ranks as there are."""
    is_wrong = False
    with start(device=DeviceKind.auto, timeout_s=60) as world, torch.inference_mode():
        for fault in faults(world):
            say(fault=fault)
            is_wrong = True
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
