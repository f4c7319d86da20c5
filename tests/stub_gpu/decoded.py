"""On the stub device: what two runs of a decoder leave; the first one captures, the second one replays."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request
from tests.stub_gpu import device
from tests.stub_gpu.device import Record

NEW_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a setting left; `between` and `nodes` are of a round in the middle of the second run.

    Attributes:
        is_captured: rounds run as graphs, and no capture failed.
        faults: of both runs, and of the warm-up if there was one.
        finished: the rows that got all of their tokens.
        between: kinds and texts of what the host did from this round to the next, without looks at events.
        nodes: kinds of the nodes of each graph, in the order of their launches.
    """

    is_captured: bool
    faults: list[str]
    finished: int
    between: list[str]
    nodes: list[list[str]]


def requests_for(num_rows: int) -> list[Request]:
    """A request for each row, of different lengths."""
    return [
        Request(index=row, prompt_ids=tuple(range(5, 25 + row)), max_new_tokens=NEW_TOKENS) for row in range(num_rows)
    ]


@torch.inference_mode()
def decode_twice(decoder: Decoder, requests: Sequence[Request], *, num_pieces: int) -> Left:
    """Decode twice, with rounds of so many graphs."""
    logs, finished = [device.log()], set[int]()
    for _ in range(2):
        device.reset()
        finished = {
            update.completion.request.index
            for updates in decoder.run(requests)
            for update in updates
            if len(update.completion.token_ids) == NEW_TOKENS
        }
        logs.append(device.log())
    device.reset()
    inside = _round_in_the_middle(logs[-1], num_pieces)
    graphs = [device.graph(int(record.text)) for record in inside if record.kind == "replay"]
    executor = decoder.executor
    return Left(
        is_captured=isinstance(executor, GraphExecutor) and not executor.failed,
        faults=[fault for log in logs for fault in device.faults(log)],
        finished=len(finished),
        between=[f"{record.kind} {record.text}" for record in inside if record.kind != "poll"],
        nodes=[[node.kind for node in graph] for graph in graphs],
    )


def _round_in_the_middle(records: Sequence[Record], num_pieces: int) -> Sequence[Record]:
    """From its first replay to that of the next round; empty if too little was replayed."""
    places = [place for place, record in enumerate(records) if record.kind == "replay"]
    if len(places) < 4 * num_pieces:
        return []
    first = len(places) // 2 // num_pieces * num_pieces
    return records[places[first] : places[first + num_pieces]]
