"""What ranks write when drafting overlaps verification; started by `test_overlap` through torchrun, as OUT."""

import json
import sys
from itertools import product
from pathlib import Path

import torch

from benchmarks.decoding import run_config
from llama_ssp.ranks.world import start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.jobs import encode
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
from llama_ssp.speculate.engine.state import Request
from tests.helpers.prompts import PROMPTS

NUM_NEW_TOKENS = 24
RULES = {"greedy": (0.0, "speculative"), "sampled": (0.8, "speculative"), "coupled": (0.8, "coupled")}
LAYOUTS = {2: [([0], [1]), ([1], [0])], 3: [([0, 1], [2]), ([0], [1, 2])]}
BATCHES = (1, 5)


def texts(config: RunConfig, *, speculative: bool) -> list[list[int]]:
    """The ids of some prompts on these ranks; the same on all of them."""
    with start(device=DeviceKind.cpu, timeout_s=120) as world:
        models = load_models(config, world, find_sources(config, world))
        requests = [
            Request(
                index=index,
                prompt_ids=encode(prompt, models.tokenizer, chat=False),
                max_new_tokens=NUM_NEW_TOKENS - index,
            )
            for index, prompt in enumerate([*PROMPTS[::6], ""])
        ]
        done: dict[int, list[int]] = {}
        with torch.inference_mode():
            for updates in build_decoder(models, config, speculative=speculative).run(requests):
                done |= {update.completion.request.index: update.completion.token_ids for update in updates}
        found = [done[index] for index in range(len(requests))]
        assert world.comm.gather_text(json.dumps(found)) == [json.dumps(found)] * world.comm.size
        return found


def main(out: Path, num_ranks: int) -> None:
    """Write all texts by what they are of."""
    found = {}
    for (rule, (temperature, rule_name)), (target, draft) in product(RULES.items(), LAYOUTS[num_ranks]):
        for batch_size, mode in product(BATCHES, ("overlapped", "plain")):
            if mode == "plain" and (batch_size > 1 or target != LAYOUTS[num_ranks][0][0]):
                continue
            placement = PlacementConfig(
                target=TargetPlacement(ranks=target), draft=DraftPlacement(kind=DraftLayout.own_gpu, ranks=draft)
            )
            config = run_config(
                catalogue.load("tiny"), catalogue.load("tiny-draft"), placement=placement, ignore_eos=False,
                sampling=SamplingConfig(temperature=temperature), verification=VerificationConfig(rule=rule_name),
                speculation=SpeculationConfig(overlap=True), batch_size=batch_size, seed=3,
            )  # fmt: skip
            name = f"{rule} {mode}" if mode == "plain" else f"{rule} {mode} {target} {draft} {batch_size}"
            found[name] = texts(config, speculative=mode != "plain")
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
