"""On stub devices, under torchrun: drafting that overlaps verification, in several settings.

Each rank writes what it saw to OUT/RANK.json: `python -m torch.distributed.run ... -m tests.stub_gpu.overlapped OUT
SETTING...`, with a device for each rank.
"""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.decoding import run_config
from benchmarks.first_hour.engine import watched
from llama_ssp.ranks.world import World, start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import (
    DeviceKind,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    TargetPlacement,
    VerificationConfig,
)
from tests.stub_gpu.decoded import Left, decode_twice, requests_for
from tests.stub_gpu.overlapped_settings import PIECES, SETTINGS, Setting


def config_of(setting: Setting, num_ranks: int) -> RunConfig:
    """The shipped pair, the draft on the last ranks."""
    ranks = [*range(num_ranks)]
    target, draft = ranks[: -setting.num_draft_ranks], ranks[-setting.num_draft_ranks :]
    placement = PlacementConfig(
        target=TargetPlacement(ranks=target), draft=DraftPlacement(kind=DraftLayout.own_gpu, ranks=draft)
    )
    return run_config(
        catalogue.load("tiny"), catalogue.load("tiny-draft"), placement=placement, device=DeviceKind.cuda,
        sampling=SamplingConfig(temperature=0.8, top_k=setting.top_k), speculation=SpeculationConfig(overlap=True),
        verification=VerificationConfig(rule=setting.rule), batch_size=setting.batch_size,
        cuda_graphs=setting.cuda_graphs,
    )  # fmt: skip


@torch.inference_mode()
def decode(world: World, setting: Setting) -> Left:
    """Decode twice, after a warm-up that captures."""
    config = config_of(setting, world.comm.size)
    models = load_models(config, world, find_sources(config, world))
    decoder = build_decoder(models, config, speculative=True)
    requests = requests_for(setting.batch_size)
    decoder.make_room(requests)
    decoder.warm_up(requests)  # captures with the sizes of a run, so that the first run captures nothing more
    decoder.executor.run = watched(decoder.executor.run)  # type: ignore[method-assign]  # the host may not wait for the device
    return decode_twice(decoder, requests, num_pieces=len(PIECES))


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
