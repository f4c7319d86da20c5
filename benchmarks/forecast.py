"""The planner against this machine: forecast / measured, for the shipped pair and random Llamas of 50 M and 300 M.

    torchrun --nproc-per-node 2 launch/run.py task=calibrate        # once: writes conf/hardware/this_machine.yaml
    python -m benchmarks.forecast                                   # one rank
    torchrun --nproc-per-node 2 -m benchmarks.forecast              # two ranks

Each target decodes 64 tokens behind a prompt of 32, plain and with the shipped draft, in fp32 at K=4 and batch 1. The
acceptance of a pair is measured in the same run and given to the planner: it is a property of models, not of machines.
Of memory, measured is how much resident memory grew by loading, and the cache's buffers.

On a shared machine a neighbour's work adds to the times of calibration and run alike, and to each at other moments. So
both are means over turns that are spread over the whole program, without the slowest tenth. The random pairs that
calibration decodes take part in the turns, and each forecast is given twice: by the calibration as it stands ("plan"),
and with what those pairs take here ("plan now"; `calibration.model_pairs`). On a shared machine only the second one
tells whether the planner is right: both of its sides are from the same minutes.
"""

import argparse
import ctypes
import gc
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import detect_hardware, machine_of_run
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.runner import Runner
from llama_ssp.planning.acceptance import implied_acceptance
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import PlannedModel, PlanSpec, read_config
from llama_ssp.planning.timing import timing
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.memory import anonymous_bytes
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
from llama_ssp.speculate.engine.completion import RowCompletion
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.words import counted

NEW_TOKENS, NUM_COMPLETIONS = 64, 2
MODES = PLAIN, NUM_DRAFT_TOKENS
SHIPPED = Path(__file__).resolve().parents[1] / "llama_ssp" / "shipped"
MIB = 2**20
WIDTH_AND_LAYERS = {"random 50 M": (512, 11), "random 300 M": (1024, 17)}
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target and a draft, by their folders."""

    name: str
    target: Path
    draft: Path


def cases(scratch: Path, world: World, shipped: Path) -> Iterator[Case]:
    """The shipped pair, and random targets of its vocabulary that are written by rank 0."""
    yield Case(name="tiny", target=shipped / "tiny", draft=shipped / "tiny-draft")
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
        yield Case(name=name, target=folder, draft=shipped / "tiny-draft")


def load(folder: Path, comm: Comm) -> tuple[Runner, int]:
    """Load a model in fp32; also says by how much resident memory grew.

    It is loaded twice and dropped once before, since libraries keep memory of their own for each new shape.
    """
    load_model(inspect(folder), dtype=torch.float32, device=torch.device("cpu"), comm=comm)
    before = settled_bytes()
    runner = load_model(inspect(folder), dtype=torch.float32, device=torch.device("cpu"), comm=comm)
    return runner, settled_bytes() - before


def settled_bytes() -> int:
    """Resident memory after everything unused has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return anonymous_bytes() or 0


def cache_bytes(runner: Runner) -> int:
    """Bytes of the cache's buffers; too few for resident memory to tell."""
    assert isinstance(runner, LeanRunner)
    assert runner._cache
    return sum(whole.nbytes for whole in runner._cache._wholes if whole is not None)


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


class Times(NamedTuple):
    """Milliseconds per token."""

    plain: float
    speculative: float


def _num_tokens(completion: RowCompletion) -> int:
    return len(completion.token_ids)


def _busy_s(completion: RowCompletion) -> float:
    """The prompt included."""
    return completion.busy_s


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A case in memory, and by how much loading it let resident memory grow; ranks but the first have no draft."""

    case: Case
    target: Runner
    draft: Runner | None
    grown_bytes: int
    decoding: DecodingPair

    def times(self) -> Times:
        """Without the slowest turns."""
        return Times(*(1e3 * seconds_per(_num_tokens, _busy_s, self.decoding.turns[number]) for number in MODES))

    def acceptance(self) -> float:
        """The probability that explains how many tokens the rounds gave."""
        drafted = [each for turn in self.decoding.turns[NUM_DRAFT_TOKENS] for each in turn]
        rounds = sum(len(each.accepted_lengths) for each in drafted)
        per_round = sum(len(each.token_ids) - 1 for each in drafted) / rounds
        return implied_acceptance(per_round, NUM_DRAFT_TOKENS)

    def memory(self, world: World, machine: HardwareConfig) -> dict[str, tuple[float, float]]:
        """Forecast and measured MiB of this rank."""
        rank = memory(planned_job(self.case, world, 0.5), machine)[world.comm.rank]
        held_bytes = sum(cache_bytes(runner) for runner in (self.target, self.draft) if runner)
        return {
            "weights MiB": ((rank.target_weights_bytes + rank.draft_weights_bytes) / MIB, self.grown_bytes / MIB),
            "cache MiB": ((rank.target_cache_bytes + rank.draft_cache_bytes) / MIB, held_bytes / MIB),
        }


def pair_of(case: Case, world: World) -> Pair:
    """Load a case."""
    target, target_bytes = load(case.target, world.comm)
    draft, draft_bytes = load(case.draft, Comm.single()) if world.comm.rank == 0 else (None, 0)
    decoding = DecodingPair(target, draft, world.comm, new_tokens=NEW_TOKENS, num_completions=NUM_COMPLETIONS)
    return Pair(case=case, target=target, draft=draft, grown_bytes=target_bytes + draft_bytes, decoding=decoding)


def as_it_is_now(machine: HardwareConfig, random_pairs: Pairs, num_ranks: int) -> HardwareConfig:
    """The machine, with whole forwards timed again."""
    before = machine.profile_of(num_ranks)
    assert before, "a calibrated machine has a profile"
    others = [each for each in machine.profiles if each is not before]
    return replace(machine, profiles=[*others, composed(Measured(before, random_pairs.times()), machine)])


def planned(pair: Pair, world: World, machine: HardwareConfig) -> Forecast:
    """What a plan says of whole completions."""
    return forecast(timing(planned_job(pair.case, world, pair.acceptance()), machine))


def main(shipped: Path, num_turns: int) -> None:
    """Compare every case and print the tables on rank 0."""
    transformers.utils.logging.disable_progress_bar()
    with start(device=DeviceKind.cpu, timeout_s=600) as world, tempfile.TemporaryDirectory() as scratch:
        machine = machine_of_run(detect_hardware(on_cpu=True), world.comm.size)
        if not machine.profiles:
            raise SystemExit("this machine is not calibrated: start task=calibrate first")
        shared = Path(world.comm.broadcast_text(scratch, src=0))
        pairs = [pair_of(case, world) for case in cases(shared, world, shipped)]
        random_pairs = Pairs(world.comm)
        for _ in range(num_turns):
            random_pairs.turn()
            for pair in pairs:
                pair.decoding.turn()
        held = [
            json.loads(text) for text in world.comm.gather_text(json.dumps([p.memory(world, machine) for p in pairs]))
        ]
        if world.comm.rank == 0:
            print_times(pairs, world, machine, as_it_is_now(machine, random_pairs, world.comm.size))
            print_memory([pair.case.name for pair in pairs], held)


def print_times(pairs: Sequence[Pair], world: World, machine: HardwareConfig, now: HardwareConfig) -> None:
    """Forecasts over what a run takes."""
    title = f"milliseconds per token, {counted(world.comm.size, 'rank')}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0, 0, 1))
    for column in ("", "", "plan", "plan\nnow", "run", "plan\n/ run", "now\n/ run"):
        table.add_column(column, justify="right" if column else "left", vertical="bottom", no_wrap=not column)
    near, near_now, num_rows = 0, 0, 0
    for pair in pairs:
        then, today = (planned(pair, world, each) for each in (machine, now))
        took = pair.times()
        for mode in Times._fields:
            run_ms = getattr(took, mode)
            plan_ms, now_ms = (getattr(each, f"{mode}_ms_per_token") for each in (then, today))
            figures = plan_ms, now_ms, run_ms, plan_ms / run_ms, now_ms / run_ms
            table.add_row(pair.case.name, mode, *(f"{figure:.2f}" for figure in figures))
            num_rows, near = num_rows + 1, near + is_near(plan_ms / run_ms)
            near_now += is_near(now_ms / run_ms)
    Console().print(table)
    print(f"within 10 %: {near_now} of {num_rows} with the pairs of these turns, {near} by the calibration alone")


def is_near(ratio: float) -> bool:
    """Whether a forecast is within 10 % of what was measured."""
    return abs(ratio - 1) <= 0.1  # noqa: PLR2004 - as the sentence says


def print_memory(names: Sequence[str], held: Sequence[Sequence[Mapping[str, tuple[float, float]]]]) -> None:
    """Of all ranks."""
    for rank, cases_of_rank in enumerate(held):
        for name, figures in zip(names, cases_of_rank, strict=True):
            for part, (planned_mib, held_mib) in figures.items():
                ratio = planned_mib / held_mib
                print(
                    f"{name:13} rank {rank}  {part:12} plan {planned_mib:8.2f}  measured {held_mib:8.2f}  {ratio:.3f}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shipped", type=Path, default=SHIPPED, help="folder of tiny and tiny-draft")
    parser.add_argument("--turns", type=int, default=20)
    given = parser.parse_args()
    main(given.shipped, given.turns)
