"""Drafting that overlaps verification on two GPUs: `torchrun --nproc-per-node 2 -m benchmarks.gpu_overlap`.

Synthetic models at true sizes, the target on the first GPU and the draft on the other. Each K runs in three ways, which
take turns on the same prompts: one after the other, overlapped, and overlapped with the messages behind the forward
instead of beside it (see `engine.executors.cuda_overlap`). The last way shows what messages beside the forward save,
and what they cost: a kernel that waits for a message occupies a part of the target's GPU. Times are per token after the
first. Every pair is a row of `results/gpu.jsonl`. `--quick` runs the shipped pair on any two ranks.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import transformers
from rich.console import Console

from benchmarks.gpu_engine import AGREEMENT
from benchmarks.gpu_forecast import machine_at_hand
from benchmarks.overlap import Candidate, candidates, forecast_ms
from benchmarks.timing import store
from llama_ssp.calibration.interleave import interleave
from llama_ssp.calibration.operators import copy_bytes_per_s
from llama_ssp.config import catalogue
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import (
    MODEL_DRAFT,
    DeviceKind,
    DrafterConfig,
    DraftLayout,
    DraftPlacement,
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
from llama_ssp.config.tasks.generate import GenerateConfig
from llama_ssp.distributed.world import World, start
from llama_ssp.engine.executors.cuda_graph import CudaRecorder
from llama_ssp.engine.executors.cuda_overlap import CudaOverlap, SameStream
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.overlap import OverlappedRound
from llama_ssp.session.checkpoints import find_sources
from llama_ssp.session.loading import Models, load_models

PAIRS = (("30B", "7B"), ("13B", "tinyllama_1B"), ("7B", "tinyllama_1B"))
QUICK_PAIRS = (("tiny", "tiny-draft"),)
LENGTHS, QUICK_LENGTHS = (1, 2, 4, 6, 8), (2, 4)
NUM_REPETITIONS, QUICK_REPETITIONS = 12, 1
BESIDE, BEHIND, ONE_BY_ONE = "overlapped", "overlapped, messages behind the forward", "one by one"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A candidate and how it was measured; `ms` is per token."""

    name: str
    num_draft_tokens: int
    ms: float
    forecast_ms: float
    tokens_per_round: float
    round_ms: float
    waits: bool
    idle_shares: list[float]


def config_of(target: str, draft: str, *, quick: bool) -> RunConfig:
    """The run of a pair."""

    def entry(name: str) -> ModelConfig:
        return replace(catalogue.load(name), dtype=Dtype.fp32 if quick else Dtype.fp16, quantization="none")

    return RunConfig(
        task=GenerateConfig(),
        model=entry(target),
        draft=DrafterConfig(kind=MODEL_DRAFT, model=entry(draft)),
        placement=PlacementConfig(draft=DraftPlacement(kind=DraftLayout.own_gpu)),
        sampling=SamplingConfig(temperature=0.8),
        verification=VerificationConfig(),
        speculation=SpeculationConfig(overlap=True),
        weights=WeightsKind.synthetic,
        synthetic=SyntheticConfig(agreement=AGREEMENT),
        device=DeviceKind.auto if quick else DeviceKind.cuda,
        ignore_eos=True,
    )


def behind_the_forward(decoder: Decoder) -> None:
    """Let the messages of a decoder follow the forward."""
    round_ = decoder.round
    assert isinstance(round_, OverlappedRound)
    recorder, beside = (CudaRecorder(finish=round_.verifier.comm.finish) for _ in range(2))
    decoder.executor = CudaOverlap(round_, recorder=recorder, beside=beside, lane=SameStream())


def ways_of(
    models: Models, world: World, config: RunConfig, *, lengths: Sequence[int], num_prompts: int
) -> dict[tuple[str, int], Candidate]:
    """All candidates, by way and K."""
    names = [(BESIDE, True), (ONE_BY_ONE, False)] + ([(BEHIND, True)] if world.device.type == "cuda" else [])
    found = {}
    for name, overlaps in names:
        made = candidates(models, world, config, lengths=lengths, modes=[overlaps], num_prompts=num_prompts)
        for each in made.values():
            if name == BEHIND:
                behind_the_forward(each.decoder)
            found[name, each.num_draft_tokens] = each
    return found


@torch.inference_mode()
def measure(
    world: World, config: RunConfig, machine: HardwareConfig, *, lengths: Sequence[int], num_repetitions: int
) -> list[Way]:
    """All ways of a pair; both ranks call it."""
    models = load_models(config, world, find_sources(config, world))
    found = ways_of(models, world, config, lengths=lengths, num_prompts=num_repetitions)
    interleave(
        {f"{name} K={number}": each.run for (name, number), each in found.items()}, num_repetitions=num_repetitions
    )
    figures = {key: each.figures() for key, each in found.items()}
    num_examined = sum(each.num_examined for each in figures.values())
    acceptance = sum(each.num_accepted for each in figures.values()) / max(num_examined, 1)
    ways = []
    for (name, number), each in figures.items():
        speculation = replace(config.speculation, num_draft_tokens=number, overlap=name != ONE_BY_ONE)
        expected = forecast_ms(replace(config, speculation=speculation), machine, acceptance=acceptance)
        ways.append(
            Way(
                name=name,
                num_draft_tokens=number,
                ms=each.ms_per_token,
                forecast_ms=expected,
                tokens_per_round=each.tokens_per_round,
                round_ms=1e3 * each.round_s,
                waits=each.waits,
                idle_shares=each.idle_shares,
            )
        )
    return ways


def main() -> None:
    """Measure all pairs, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shipped pair and few tokens, on any device")
    parser.add_argument("--store", action=argparse.BooleanOptionalAction, help="default: unless --quick")
    arguments = parser.parse_args()
    quick, console = arguments.quick, Console()
    transformers.utils.logging.set_verbosity_error()
    with start(device=DeviceKind.auto if quick else DeviceKind.cuda, timeout_s=600) as world:
        copied = copy_bytes_per_s(world.device, 2**24 if quick else 2**30)
        machine = replace(machine_at_hand(world.device, copy_bytes_per_s=copied), num_gpus=2)
        for target, draft in QUICK_PAIRS if quick else PAIRS:
            ways = measure(
                world, config_of(target, draft, quick=quick), machine, lengths=QUICK_LENGTHS if quick else LENGTHS,
                num_repetitions=QUICK_REPETITIONS if quick else NUM_REPETITIONS,
            )  # fmt: skip
            if world.comm.rank > 0:
                continue
            row = {"name": f"overlap: {target} with {draft}", "quick": quick, "ways": [asdict(way) for way in ways]}
            console.print(row)
            if not quick if arguments.store is None else arguments.store:
                store("gpu", {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"} | row)


if __name__ == "__main__":
    main()
