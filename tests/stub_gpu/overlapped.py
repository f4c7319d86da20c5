"""On stub devices, under torchrun: drafting that overlaps verification, in several settings.

Each rank writes what it saw to OUT/RANK.json: `python -m torch.distributed.run ... -m tests.stub_gpu.overlapped OUT
SETTING...`, with a device for each rank.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.first_hour.engine import watched
from llama_ssp.ranks.world import World, start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DeviceKind,
    DrafterConfig,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    TargetPlacement,
    VerificationConfig,
)
from llama_ssp.settings.tasks import GenerateConfig
from llama_ssp.speculate.engine.executors import GraphExecutor
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.overlap import OverlappedRound
from llama_ssp.speculate.engine.state import Request
from tests.stub_gpu import device
from tests.stub_gpu.overlapped_settings import NEW_TOKENS, SETTINGS, Setting


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a setting left on a rank; all lists are of the second run.

    Attributes:
        is_captured: rounds run as graphs, and no capture failed.
        faults: of both runs.
        finished: the rows that got all of their tokens.
        num_captured: graphs of either run.
        between: kinds and texts of what the host did from one round to the next, without looks at events.
        nodes: kinds of the nodes of each graph of a round, in the order of their launches.
        sent_bytes: of messages to one rank, in the same graphs.
    """

    is_captured: bool
    faults: list[str]
    finished: int
    num_captured: list[int]
    between: list[str]
    nodes: list[list[str]]
    sent_bytes: list[int]


def config_of(setting: Setting, num_ranks: int) -> RunConfig:
    """The shipped pair, the draft on the last ranks."""
    ranks = [*range(num_ranks)]
    target, draft = ranks[: -setting.num_draft_ranks], ranks[-setting.num_draft_ranks :]
    return RunConfig(
        task=GenerateConfig(),
        model=catalogue.load("tiny"),
        draft=DrafterConfig(kind=MODEL_DRAFT, model=catalogue.load("tiny-draft")),
        placement=PlacementConfig(
            target=TargetPlacement(ranks=target), draft=DraftPlacement(kind=DraftLayout.own_gpu, ranks=draft)
        ),
        sampling=SamplingConfig(temperature=0.8, top_k=setting.top_k),
        verification=VerificationConfig(rule=setting.rule),
        speculation=SpeculationConfig(overlap=True),
        batch_size=setting.batch_size,
        device=DeviceKind.cuda,
        cuda_graphs=setting.cuda_graphs,
        ignore_eos=True,
    )


@torch.inference_mode()
def decode(world: World, setting: Setting) -> Left:
    """Decode twice: the first run captures, the second replays."""
    config = config_of(setting, world.comm.size)
    models = load_models(config, world, find_sources(config, world))
    decoder = build_decoder(models, config, speculative=True)
    assert isinstance(decoder.round, OverlappedRound)
    decoder.round.waits = setting.waits
    requests = [
        Request(index=row, prompt_ids=tuple(range(5, 25 + row)), max_new_tokens=NEW_TOKENS)
        for row in range(setting.batch_size)
    ]
    decoder.make_room(requests)
    decoder.warm_up(requests)  # captures with the sizes of a run, so that the first run captures nothing more
    executor = decoder.executor
    executor.run = watched(executor.run)  # type: ignore[method-assign]  # the host may not wait for the device
    logs, finished = [device.log()], 0
    for _ in range(2):
        device.reset()
        finished = _run(decoder, requests)
        logs.append(device.log())
    device.reset()
    _, _, records = logs
    graphs = _graphs(records, setting.num_pieces)
    return Left(
        is_captured=isinstance(executor, GraphExecutor) and not executor.failed,
        faults=[fault for log in logs for fault in device.faults(log)],
        finished=finished,
        num_captured=[sum(record.kind == "captured" for record in log) for log in logs],
        between=_between(records, setting.num_pieces),
        nodes=[[node.kind for node in graph] for graph in graphs],
        sent_bytes=[
            int(node.text.removeprefix("send ")) for graph in graphs for node in graph if node.text.startswith("send ")
        ],
    )


def _run(decoder: Decoder, requests: Sequence[Request]) -> int:
    finished = {
        update.completion.request.index
        for updates in decoder.run(requests)
        for update in updates
        if len(update.completion.token_ids) == NEW_TOKENS
    }
    return len(finished)


def _middle(records: Sequence[device.Record], num_pieces: int) -> tuple[int, int]:
    """Where a round in the middle of a run begins, and the next one; both 0 if nothing was replayed."""
    places = [place for place, record in enumerate(records) if record.kind == "replay"]
    if len(places) < 4 * num_pieces:
        return 0, 0
    first = len(places) // 2 // num_pieces * num_pieces
    return places[first], places[first + num_pieces]


def _between(records: Sequence[device.Record], num_pieces: int) -> list[str]:
    begin, end = _middle(records, num_pieces)
    return [f"{record.kind} {record.text}" for record in records[begin:end] if record.kind != "poll"]


def _graphs(records: Sequence[device.Record], num_pieces: int) -> list[list[device.Record]]:
    begin, end = _middle(records, num_pieces)
    return [device.graph(int(record.text)) for record in records[begin:end] if record.kind == "replay"]


def main() -> None:
    """Decode with the named settings, and write down what is left."""
    out, names = Path(sys.argv[1]), sys.argv[2:]
    logging.basicConfig(level=logging.WARNING)
    left = {}
    with start(device=DeviceKind.cuda, timeout_s=60) as world:
        for name in names:
            left[name] = asdict(decode(world, SETTINGS[name]))
        (out / f"{world.comm.rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
