"""On the stub device: captures that obey the rules and captures that do not, and what becomes of each.

`python -m tests.stub_gpu.captures` prints what each case left as JSON.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from llama_ssp.speculate.engine.executors import CudaRecorder
from tests.stub_gpu import device

CUDA = "cuda"


def record(piece: Callable[[], Tensor]) -> dict[str, object]:
    """Record a piece as the executor does, and replay it twice."""
    recorder = CudaRecorder()
    device.reset()
    try:
        _, replay = recorder.record(piece)
    except RuntimeError as error:
        return {"error": str(error).partition("\n")[0], "log": device.log(), "nodes": []}
    replay()
    replay()
    log = device.log()
    [number] = [int(each.text) for each in log if each.kind == "captured"]
    return {"error": None, "log": log, "nodes": device.graph(number)}


def main() -> None:
    """Print what every case left."""
    values = torch.ones(64, 64, device=CUDA)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    torch.mm(values, values).add_(1)  # the warm-up
    event.record()

    def on_a_side_stream(*, joined: bool) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            summed = values + 1
        if joined:
            torch.cuda.current_stream().wait_stream(side)
        return summed

    def queries_an_event() -> Tensor:
        event.query()
        return values + 1

    cases: dict[str, Callable[[], Tensor]] = {
        "product": lambda: torch.mm(values, values).add_(1),
        "joined": lambda: on_a_side_stream(joined=True),
        "unjoined": lambda: on_a_side_stream(joined=False),
        "reads a value": lambda: values * float(values.sum()),
        "queries an event": queries_an_event,
    }
    sys.stdout.write(json.dumps({name: record(piece) for name, piece in cases.items()}) + "\n")


if __name__ == "__main__":
    main()
