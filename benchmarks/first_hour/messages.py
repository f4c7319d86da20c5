"""Messages of all GPUs, from Python, captured and replayed: `torchrun ... -m benchmarks.first_hour.messages`.

Sums of several sizes, timed, by NCCL and by the kernel of `kernels.sums`; then every other kind of message; then a
graph in which messages of two communicators take turns, as a round has them with the draft on a GPU of its own.
"""

import sys
import time
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.first_hour.step import say
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import start
from llama_ssp.settings.schema import DeviceKind
from llama_ssp.speculate.engine.executors import Recorder

NUM_SUMS, NUM_TURNS = 20, 10
Piece = Callable[[], object]


def ready(piece: Piece, comm: Comm, *, is_captured: bool) -> Piece:
    """The piece, which has run once, or a graph of it."""
    return Recorder(finish=comm.finish).record(piece)[1] if is_captured else piece


def done(piece: Piece, comm: Comm) -> None:
    """Run a piece to its end."""
    piece()
    if comm.device.type == "cuda":
        comm.finish()


def replay(piece: Piece, comm: Comm, *, is_captured: bool) -> None:
    """Run a piece, then three times again, captured or not."""
    done(piece, comm)
    again = ready(piece, comm, is_captured=is_captured)
    for _ in range(3):
        done(again, comm)


def fault_of_a_sum(comm: Comm, kib: int, *, is_captured: bool) -> str | None:
    """Say the microseconds of a sum of all ranks' own numbers, counted from 1; a sentence if it is wrong."""
    values = torch.zeros(1, kib * 512, dtype=torch.float16, device=comm.device)

    def own() -> Tensor:
        return comm.all_reduce(values.fill_(comm.rank + 1))

    def many() -> None:
        values.zero_()
        for _ in range(NUM_SUMS):
            comm.all_reduce(values)

    own()  # makes the communicator
    times, sums, sum_once = [], *(ready(piece, comm, is_captured=is_captured) for piece in (many, own))
    for _ in range(1 + NUM_TURNS):
        comm.barrier()
        started = time.perf_counter()
        done(sums, comm)
        times.append(time.perf_counter() - started)
    if comm.rank == 0:
        say(kib=kib, captured=is_captured, own=comm.peers is not None, us=1e6 * min(times) / NUM_SUMS)
    done(sum_once, comm)
    is_wrong = bool((values != comm.size * (comm.size + 1) // 2).any())
    return f"rank {comm.rank}: a sum of {kib} KiB is wrong, captured: {is_captured}" if is_wrong else None


def faults_of_others(comm: Comm, *, is_captured: bool) -> Iterator[str]:
    """Slices of a vocabulary that differ in size, ids from one rank, and probabilities from the last to the first."""
    sizes, rank, last = tuple(1000 + rank for rank in range(comm.size)), comm.rank, comm.size - 1
    step = torch.zeros((), device=comm.device)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=comm.device)
    probs = torch.zeros(1, 4, 4096, device=comm.device)
    joined = torch.zeros(5, sum(sizes), dtype=torch.float16, device=comm.device)

    def piece() -> None:
        step.add_(1)
        own = torch.full((5, sizes[rank]), float(rank), dtype=joined.dtype, device=comm.device)
        joined.copy_(comm.all_gather_last(own, sizes))
        comm.broadcast(ids.fill_(rank + 7), src=0)
        if rank == last:
            comm.send(probs.fill_(3).mul_(step), dst=0)
        elif rank == 0:
            comm.receive(probs, src=last)

    replay(piece, comm, is_captured=is_captured)
    wanted = torch.cat([joined.new_full((size,), rank) for rank, size in enumerate(sizes)])
    rights = {
        "a gather": (joined == wanted).all(),
        "a broadcast": (ids == 7).all(),
        "a message": rank not in {0, last} or (probs == 3 * step).all(),
    }
    yield from (f"rank {rank}: {name} is wrong, captured: {is_captured}" for name, right in rights.items() if not right)


def faults_of_two(world: Comm, *, is_captured: bool) -> Iterator[str]:
    """A broadcast in the world, sums of all ranks but the last, and a broadcast again."""
    part = world.subgroup(tuple(range(max(2, world.size - 1))))
    values = torch.zeros(5, 1024, device=world.device)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=world.device)

    def piece() -> None:
        world.broadcast(ids.fill_(world.rank), src=world.size - 1)
        if part:
            for _ in range(4):
                part.all_reduce(values.fill_(part.rank + 1))
        world.broadcast(ids.add_(world.rank), src=0)

    replay(piece, world, is_captured=is_captured)
    if (ids != world.size - 1).any() or (part and (values != part.size * (part.size + 1) // 2).any()):
        yield f"rank {world.rank}: messages of two communicators are wrong, captured: {is_captured}"


def faults(world: Comm) -> Iterator[str]:
    """Make all checks."""
    ways = (False, True) if world.device.type == "cuda" else (False,)
    own = world.with_peers()
    for comm in (world, *([own] if own.peers else [])):
        yield from filter(None, (fault_of_a_sum(comm, kib, is_captured=way) for kib, way in product((8, 16, 64), ways)))
    for way in ways:
        yield from faults_of_others(world, is_captured=way)
        yield from faults_of_two(world, is_captured=way)


if __name__ == "__main__":
    with start(device=DeviceKind.auto, timeout_s=60) as world, torch.inference_mode():
        found = [*faults(world.comm)]
        ended = time.perf_counter()
    say(left_s=time.perf_counter() - ended)
    for fault in found:
        say(fault=fault)
    sys.exit(bool(found))
