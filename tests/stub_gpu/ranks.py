"""Two ranks on stub devices, under torchrun: bytes move through NCCL, and replays wait for each other.

Each rank writes what it saw to OUT/RANK.json: `python -m torch.distributed.run ... -m tests.stub_gpu.ranks OUT`.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from llama_ssp.speculate.engine.executors import CudaRecorder
from tests.stub_gpu import device

LATE_S = 2.0
"""By how much the second rank launches its replay later than the first."""


def bytes_of_all_ranks(rank: int, size: int) -> list[list[int]]:
    """What an all-gather of a message from each host brings, and what the first rank's broadcast does."""
    own = torch.tensor([rank + 1, 10 * (rank + 1)], device="cuda")
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own)
    found = [each.tolist() for each in gathered]
    message = torch.tensor([7 + rank], device="cuda")
    dist.broadcast(message, src=0)
    return [*found, message.tolist()]


def replay_with_a_late_peer(rank: int) -> dict[str, object]:
    """How long a replay with a collective takes on each rank, and what was captured."""
    values = torch.ones(1024, device="cuda")
    dist.all_reduce(values)
    device.reset()
    _, replay = CudaRecorder().record(lambda: dist.all_reduce(values.add_(1)))
    log = device.log()
    [number] = [int(record.text) for record in log if record.kind == "captured"]
    dist.barrier()
    torch.cuda.synchronize()
    time.sleep(LATE_S * rank)
    started, passed = time.monotonic(), torch.cuda.Event()
    replay()
    passed.record()
    launched_s = time.monotonic() - started
    passed.synchronize()
    return {
        "faults": device.faults(log),
        "nodes": [record.kind for record in device.graph(number)],
        "launched_s": launched_s,
        "passed_s": time.monotonic() - started,
        "live": device.num_live_graphs(),
    }


def main() -> None:
    """See all of it, and write it down."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    found = {"bytes": bytes_of_all_ranks(rank, size), "replay": replay_with_a_late_peer(rank)}
    dist.destroy_process_group()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
