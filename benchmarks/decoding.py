"""Synthetic pairs on one device, and what their rounds take: parts of several programs."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llama_ssp import Pair, catalogue
from llama_ssp.catalogue import Dtype, ModelConfig
from llama_ssp.ranks.world import start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.requests import encode
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.run.tuning import make_ready
from llama_ssp.settings.extensions import whole
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DeviceKind,
    DrafterConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    VerificationConfig,
)
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request

if TYPE_CHECKING:
    from llama_ssp.extensions.benchmark.benchmark import Ours, Peers

AGREEMENT, CPU = 0.8, torch.device("cpu")
TEXT = '''\
import os
import sys


class Stack:
    """A list of items, the last one first."""

    def __init__(self, items):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)

    def __len__(self):
        return len(self.items)


def main(argv):
    for name in argv[1:]:
        with open(name) as file:
            print(len(file.read()))
'''


def run_config(model: ModelConfig, draft: ModelConfig | None, **more: Any) -> RunConfig:
    """A run of a target and its draft, which ends no text early; nothing is written into its folder."""
    fields: dict[str, Any] = {
        "task": GenerateConfig(),
        "placement": PlacementConfig(),
        "sampling": SamplingConfig(temperature=0.8),
        "verification": VerificationConfig(),
        "device": DeviceKind.cpu,
        "ignore_eos": True,
        "run_dir": "outputs",
    }
    drafter = DrafterConfig(kind=MODEL_DRAFT, model=draft) if draft else DrafterConfig(kind=NO_DRAFT)
    run: RunConfig = whole(RunConfig)(model=model, draft=drafter, **fields | more)
    return run


def config_of(
    target: str, draft: str | None, *, dtype: Dtype, device: torch.device, quantization: str = "none"
) -> RunConfig:
    """The run of a synthetic target, and of its draft, on a device; `quantization` is the target's."""
    from llama_ssp.extensions.synthetic.records import NAME, SyntheticConfig

    return run_config(
        replace(catalogue.load(target), dtype=dtype, quantization=quantization),
        replace(catalogue.load(draft), dtype=dtype, quantization="none") if draft else None,
        sampling=SamplingConfig(),
        weights=NAME,
        synthetic=SyntheticConfig(agreement=AGREEMENT),
        device=DeviceKind[device.type],
    )


def load_pair(config: RunConfig) -> Pair:
    """Make the models of a run in this process."""
    with start(device=config.device, timeout_s=60) as world:
        return Pair(models=load_models(config, world, find_sources(config, world)), config=config, world=world)


def make_decoder(
    pair: Pair,
    *,
    speculative: bool,
    temperature: float = 0.8,
    batch_size: int = 1,
    cuda_graphs: bool = True,
    speculation: SpeculationConfig | None = None,
) -> Decoder:
    """A decoder over a pair that is in memory."""
    config = replace(
        pair.config,
        sampling=SamplingConfig(temperature=temperature),
        speculation=speculation or SpeculationConfig(),
        batch_size=batch_size,
        cuda_graphs=cuda_graphs,
    )
    return build_decoder(pair.models, config, speculative=speculative)


def ours(
    pair: Pair, config: RunConfig, prompts: Sequence[tuple[int, ...]], *, num_new_tokens: int, speculative: bool
) -> "Ours":
    """A candidate of the program's own, whose costs are measured if it chooses K."""
    from llama_ssp.extensions.benchmark.benchmark import Ours

    decoder = build_decoder(pair.models, config, speculative=speculative)
    wanted = [Request(index=0, prompt_ids=ids, max_new_tokens=num_new_tokens) for ids in prompts]
    with torch.inference_mode():
        make_ready(decoder, wanted, config, comm=pair.models.mesh.world)
    return Ours(decoder=decoder, prompts=prompts, num_new_tokens=num_new_tokens)


def peers_of(folders: Iterable[Path], dtype: torch.dtype, device: torch.device = CPU) -> "Peers":
    """A target and its draft in transformers."""
    from llama_ssp.extensions.benchmark.benchmark import Peers, load_peer

    target, draft = (load_peer(folder, dtype=dtype, device=device) for folder in folders)
    return Peers(target=target, draft=draft)


def default_prompts(task: str) -> list[str]:
    """The prompts of a run of a task without others."""
    files = (folder / "task" / f"{task}.yaml" for folder in catalogue.folders())
    prompts: list[str] = catalogue.read(next(filter(Path.is_file, files)))["default_prompts"]
    return prompts


def prompt(pair: Pair, num_tokens: int) -> tuple[int, ...]:
    """A readable prompt of just so many tokens."""
    ids = encode(TEXT, pair.models.tokenizer)
    return (ids * (num_tokens // len(ids) + 1))[:num_tokens]


def requests(pair: Pair, *, number: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """Samples of one prompt, all of the same lengths."""
    ids = prompt(pair, prompt_tokens)
    return [Request(index=0, sample=sample, prompt_ids=ids, max_new_tokens=new_tokens) for sample in range(number)]


@torch.inference_mode()
def decode_once(decoder: Decoder, wanted: list[Request], *, seed: int) -> tuple[float, int, list[RowCompletion]]:
    """Seconds between the prefill's result and the last one, the rounds in between, and the completions."""
    completions: dict[int, RowCompletion] = {}
    arrivals = []
    for updates in decoder.run(wanted, replace(decoder.settings, seed=seed)):
        arrivals.append(time.perf_counter())
        completions |= {update.completion.request.sample: update.completion for update in updates}
    return arrivals[-1] - arrivals[0], len(arrivals) - 1, list(completions.values())
