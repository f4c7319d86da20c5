"""The planner against this machine: forecast / measured, for the shipped pair and random Llamas of 50 M and 300 M.

    torchrun --nproc-per-node 2 launch/run.py task=calibrate        # once: writes conf/hardware/this_machine.yaml
    python -m benchmarks.forecast                                   # one rank
    torchrun --nproc-per-node 2 -m benchmarks.forecast              # two ranks

Each target decodes 64 tokens behind a prompt of 32, plain and with the shipped draft, in fp32 at K=4 and batch 1. The
acceptance of a pair is measured in the same run and given to the planner: it is a property of models, not of machines.

On a shared machine a neighbour's work adds to the times of calibration and run alike, and to each at other moments. So
both are means over turns that are spread over the whole program, without the slowest tenth. The random pairs that
calibration decodes take part in the turns, and each forecast is given twice: by the calibration as it stands ("plan"),
and with what those pairs take here ("plan now"; `calibration.model_pairs`). On a shared machine only the second one
tells whether the planner is right: both of its sides are from the same minutes.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measured import ROOT, markdown
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import detect_hardware, machine_of_run
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.planning.acceptance import implied_acceptance
from llama_ssp.planning.spec import PlannedModel, PlanSpec, read_config
from llama_ssp.planning.timing import timing
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import World, start
from llama_ssp.reports.records import Forecast
from llama_ssp.run.calibration.model_pairs import (
    NUM_DRAFT_TOKENS,
    PLAIN,
    PROMPT_TOKENS,
    VOCAB_SIZE,
    DecodingPair,
    Pairs,
    seconds_per,
)
from llama_ssp.run.calibration.profiles import Measured, composed
from llama_ssp.run.tasks.dry_run import forecast
from llama_ssp.settings.schema import DeviceKind, DraftLayout, Dtype, TargetKind
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.words import counted

NEW_TOKENS, NUM_COMPLETIONS = 64, 2
MODES = {"plain": PLAIN, "speculative": NUM_DRAFT_TOKENS}
SHIPPED = ROOT / "llama_ssp" / "shipped"
WIDTH_AND_LAYERS = {"random 50 M": (512, 11), "random 300 M": (1024, 17)}
HEAD_DIM, NEAR = 64, 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target and a draft, by their folders."""

    name: str
    target: Path
    draft: Path


def cases(scratch: Path, world: World) -> Iterator[Case]:
    """The shipped pair, and random targets of its vocabulary that are written by rank 0."""
    yield Case(name="tiny", target=SHIPPED / "tiny", draft=SHIPPED / "tiny-draft")
    for name, (width, num_layers) in WIDTH_AND_LAYERS.items():
        folder = scratch / name.replace(" ", "_")
        if world.comm.rank == 0:
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=VOCAB_SIZE, max_position_embeddings=2048, hidden_size=width, intermediate_size=4 * width,
                num_hidden_layers=num_layers, num_attention_heads=width // HEAD_DIM,
            )  # fmt: skip
            LlamaForCausalLM(config).save_pretrained(folder)
        world.comm.barrier()
        yield Case(name=name, target=folder, draft=SHIPPED / "tiny-draft")


def load(folder: Path, comm: Comm) -> Runner:
    """Load a model in fp32."""
    return load_model(inspect(folder), dtype=torch.float32, device=torch.device("cpu"), comm=comm)


def planned_checkpoint(folder: Path) -> PlannedModel:
    """A checkpoint in fp32, as the planner sees it."""
    shape, stored = read_config(folder)
    return PlannedModel(name=folder.name, shape=shape, dtype=Dtype.fp32, quantization="none", stored=stored)


def planned_job(case: Case, world: World, acceptance: float) -> PlanSpec:
    """The planner's view."""
    target, draft = (planned_checkpoint(folder) for folder in (case.target, case.draft))
    return PlanSpec(
        target=target, draft=draft, target_kind=TargetKind.tensor, target_ranks=tuple(range(world.comm.size)),
        draft_kind=DraftLayout.one_rank, draft_ranks=(0,), num_draft_tokens=NUM_DRAFT_TOKENS, acceptance=acceptance,
        batch_size=1, prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS, cuda_graphs=False,
        device=world.device.type,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A case in memory."""

    case: Case
    decoding: DecodingPair

    def times(self) -> dict[str, float]:
        """Milliseconds per token by mode, without the slowest turns."""
        return {
            name: 1e3
            * seconds_per(lambda each: len(each.token_ids), lambda each: each.busy_s, self.decoding.turns[mode])
            for name, mode in MODES.items()
        }

    def acceptance(self) -> float:
        """The probability that explains how many tokens the rounds gave."""
        drafted = [each for turn in self.decoding.turns[NUM_DRAFT_TOKENS] for each in turn]
        rounds = sum(len(each.accepted_lengths) for each in drafted)
        per_round = sum(len(each.token_ids) - 1 for each in drafted) / rounds
        return implied_acceptance(per_round, NUM_DRAFT_TOKENS)


def pair_of(case: Case, world: World) -> Pair:
    """Load a case; ranks but the first have no draft."""
    target, draft = load(case.target, world.comm), None
    if world.comm.rank == 0:
        draft = load(case.draft, Comm.single())
    return Pair(
        case=case,
        decoding=DecodingPair(target, draft, world.comm, new_tokens=NEW_TOKENS, num_completions=NUM_COMPLETIONS),
    )


def as_it_is_now(machine: HardwareConfig, random_pairs: Pairs, num_ranks: int) -> HardwareConfig:
    """The machine, with whole forwards timed again."""
    before = machine.profile_of(num_ranks)
    assert before, "a calibrated machine has a profile"
    others = [each for each in machine.profiles if each is not before]
    return replace(machine, profiles=[*others, composed(Measured(before, random_pairs.times()), machine)])


def planned(pair: Pair, world: World, machine: HardwareConfig) -> Forecast:
    """The forecast of whole completions."""
    return forecast(timing(planned_job(pair.case, world, pair.acceptance()), machine))


def main(num_turns: int) -> None:
    """Compare every case, and print the table on rank 0."""
    transformers.utils.logging.disable_progress_bar()
    with start(device=DeviceKind.cpu, timeout_s=600) as world, tempfile.TemporaryDirectory() as scratch:
        machine = machine_of_run(detect_hardware(on_cpu=True), world.comm.size)
        if not machine.profiles:
            raise SystemExit("this machine is not calibrated: start task=calibrate first")
        shared = Path(world.comm.broadcast_text(scratch, src=0))
        pairs = [pair_of(case, world) for case in cases(shared, world)]
        random_pairs = Pairs(world.comm)
        for _ in range(num_turns):
            random_pairs.turn()
            for pair in pairs:
                pair.decoding.turn()
        if world.comm.rank == 0:
            print_times(pairs, world, machine, as_it_is_now(machine, random_pairs, world.comm.size))


def print_times(pairs: Sequence[Pair], world: World, machine: HardwareConfig, now: HardwareConfig) -> None:
    """Forecasts over what a run takes."""
    lines, ratios = [], []
    for pair in pairs:
        then, today = (planned(pair, world, each) for each in (machine, now))
        for mode, run_ms in pair.times().items():
            plan_ms, now_ms = (getattr(each, f"{mode}_ms_per_token") for each in (then, today))
            ratios.append((plan_ms / run_ms, now_ms / run_ms))
            lines.append([pair.case.name, mode, *(f"{each:.2f}" for each in (plan_ms, now_ms, run_ms, *ratios[-1]))])
    ranks = counted(world.comm.size, "rank")
    print(markdown([f"ms/token, {ranks}", "", "plan", "plan now", "run", "plan / run", "now / run"], lines))
    near, near_now = (sum(abs(ratio - 1) <= NEAR for ratio in each) for each in zip(*ratios, strict=True))
    print(f"within 10 %: {near_now} of {len(ratios)} with the pairs of these turns, {near} by the calibration alone")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    main(parser.parse_args().turns)
