"""Small all-reduces of all GPUs, from Python and captured: `torchrun ... -m benchmarks.first_hour.messages`."""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.first_hour.step import say
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import start
from llama_ssp.settings.schema import DeviceKind
from llama_ssp.speculate.engine.executors import CudaRecorder

NUM_SUMS, NUM_TURNS = 20, 10


def fault(comm: Comm, kib: int, *, is_captured: bool) -> str | None:
    """Say the microseconds of a sum of all ranks' own numbers, counted from 1; a sentence if it is wrong."""
    values = torch.zeros(1, kib * 512, dtype=torch.float16, device=comm.device)

    def own() -> Tensor:
        return comm.all_reduce(values.fill_(comm.rank + 1))

    def many() -> None:
        values.zero_()
        for _ in range(NUM_SUMS):
            comm.all_reduce(values)

    def ready(piece: Callable[[], object]) -> Callable[[], object]:
        return CudaRecorder(finish=comm.finish).record(piece)[1] if is_captured else piece

    own()  # makes the communicator
    times, sums, sum_once = [], ready(many), ready(own)
    for _ in range(1 + NUM_TURNS):
        comm.barrier()
        started = time.perf_counter()
        sums()
        if values.is_cuda:
            comm.finish()
        times.append(time.perf_counter() - started)
    if comm.rank == 0:
        say(kib=kib, captured=is_captured, us=1e6 * min(times) / NUM_SUMS)
    sum_once()
    is_wrong = bool((values != comm.size * (comm.size + 1) // 2).any())
    return f"rank {comm.rank}: a sum of {kib} KiB is wrong, captured: {is_captured}" if is_wrong else None


if __name__ == "__main__":
    with start(device=DeviceKind.auto, timeout_s=60) as world, torch.inference_mode():
        ways = (False, True) if world.device.type == "cuda" else (False,)
        faults = [fault(world.comm, kib, is_captured=way) for kib in (8, 16, 64) for way in ways]
    for each in filter(None, faults):
        say(fault=each)
    sys.exit(any(faults))
