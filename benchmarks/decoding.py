"""Synthetic pairs on one device, and what their rounds take: parts of several programs."""

import statistics
import time
from dataclasses import dataclass, replace

import torch

from llama_ssp import Pair
from llama_ssp.planning.acceptance import implied_acceptance
from llama_ssp.ranks.world import start
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import build_decoder, load_models
from llama_ssp.run.jobs import encode
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    NO_DRAFT,
    DeviceKind,
    DrafterConfig,
    Dtype,
    ModelConfig,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    SyntheticConfig,
    VerificationConfig,
    WeightsKind,
)
from llama_ssp.settings.tasks import GenerateConfig
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request

AGREEMENT = 0.8
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


def config_of(
    target: str, draft: str | None, *, dtype: Dtype, device: torch.device, quantization: str = "none"
) -> RunConfig:
    """The run of a synthetic target, and of its draft, on a device; `quantization` is the target's."""

    def entry(name: str) -> ModelConfig:
        return replace(catalogue.load(name), dtype=dtype, quantization="none")

    return RunConfig(
        task=GenerateConfig(),
        model=replace(entry(target), quantization=quantization),
        draft=DrafterConfig(kind=MODEL_DRAFT, model=entry(draft)) if draft else DrafterConfig(kind=NO_DRAFT),
        placement=PlacementConfig(),
        sampling=SamplingConfig(),
        verification=VerificationConfig(),
        weights=WeightsKind.synthetic,
        synthetic=SyntheticConfig(agreement=AGREEMENT),
        device=DeviceKind[device.type],
        ignore_eos=True,
    )


def load_pair(config: RunConfig) -> Pair:
    """Make the models of a run in this process."""
    with start(device=config.device, timeout_s=60) as world:
        return Pair(models=load_models(config, world, find_sources(config, world)), config=config)


def make_decoder(
    pair: Pair,
    *,
    speculative: bool,
    num_draft_tokens: int = 4,
    temperature: float = 0.8,
    batch_size: int = 1,
    cuda_graphs: bool = True,
) -> Decoder:
    """A decoder over a pair that is in memory."""
    config = replace(
        pair.config,
        sampling=SamplingConfig(temperature=temperature),
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
        batch_size=batch_size,
        cuda_graphs=cuda_graphs,
    )
    return build_decoder(pair.models, config, speculative=speculative)


def prompt(pair: Pair, num_tokens: int) -> tuple[int, ...]:
    """A readable prompt of just so many tokens."""
    ids = encode(TEXT, pair.models.tokenizer, chat=False)
    return (ids * (num_tokens // len(ids) + 1))[:num_tokens]


def requests(pair: Pair, *, number: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    """Samples of one prompt, all of the same lengths."""
    ids = prompt(pair, prompt_tokens)
    return [Request(index=0, sample=sample, prompt_ids=ids, max_new_tokens=new_tokens) for sample in range(number)]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the rounds of a full batch took, prefill left out.

    Attributes:
        round_ms: a round, or a plain step.
        ms_per_token: time over the new tokens of all rows.
        tokens_per_round: of one row, its own token included.
        acceptance: how probable it is that a drafted token is accepted, as those tokens imply; None for plain steps.
        part_ms: a round's time in draft, verify and other.
    """

    round_ms: float
    ms_per_token: float
    tokens_per_round: float
    acceptance: float | None
    part_ms: dict[str, float]


@torch.inference_mode()
def pace(decoder: Decoder, wanted: list[Request], *, num_repetitions: int = 3) -> Pace:
    """Decode one batch several times and take the median; a first time warms up and records what is to be replayed.

    Args:
        decoder: of as many rows as there are requests.
        wanted: see `requests`.
        num_repetitions: counted repetitions.
    """
    runs = [decode_once(decoder, wanted, seed=seed) for seed in range(num_repetitions + 1)][1:]
    seconds = statistics.median(run_s / num_rounds for run_s, num_rounds, _ in runs)
    completions = [completion for _, _, found in runs for completion in found]
    tokens = statistics.mean(tokens_per_round(completion) for completion in completions)
    num_draft_tokens = max(completions[0].draft_lengths, default=0)
    num_rounds = sum(completion.num_target_forwards - 1 for completion in completions) / len(wanted)
    part_ms = {
        part: 1e3 * sum(completion.part_s[part] for completion in completions) / num_rounds
        for part in completions[0].part_s
    }
    return Pace(
        round_ms=1e3 * seconds,
        ms_per_token=1e3 * seconds / (tokens * len(wanted)),
        tokens_per_round=tokens,
        acceptance=implied_acceptance(tokens, num_draft_tokens) if num_draft_tokens else None,
        part_ms=part_ms,
    )


@torch.inference_mode()
def decode_once(decoder: Decoder, wanted: list[Request], *, seed: int) -> tuple[float, int, list[RowCompletion]]:
    """Seconds between the prefill's result and the last one, the rounds in between, and the completions."""
    decoder.seed = seed
    completions: dict[int, RowCompletion] = {}
    arrivals = []
    for updates in decoder.run(wanted):
        arrivals.append(time.perf_counter())
        completions |= {update.completion.request.sample: update.completion for update in updates}
    return arrivals[-1] - arrivals[0], len(arrivals) - 1, list(completions.values())


def tokens_per_round(completion: RowCompletion) -> float:
    """Of the rounds that no limit could cut."""
    counted = [
        length + 1
        for length, examined in zip(completion.accepted_lengths, completion.examined_lengths, strict=True)
        if examined
    ]
    return statistics.mean(counted) if counted else 1.0
