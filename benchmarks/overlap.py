"""Drafting that overlaps verification, against rounds one after the other: `python -m benchmarks.overlap`.

A synthetic pair whose K draft steps take about as long as a forward of the target, on two processes with a thread each:
the target on one, the draft on the other. All candidates (overlapped or not, each K) are in memory at once and take
turns on the same prompts. Beside them stands one process with two threads that holds both models. Times are per token
after the first, on rank 0. Weights have 4 bits, so that a forward computes for longer than it reads: two processes that
read all the time slow each other on one memory, which `--quantization none` shows.

Where `task=calibrate` has measured the machine with two ranks, a plan's forecast is shown beside each of them, by the
acceptance that was measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
from rich.console import Console

from benchmarks.decoding import TEXT, decode_once
from benchmarks.overlap_pages import MATCHED_K, Comparison, Figures, summary, table
from benchmarks.timing import store
from llama_ssp.calibration.interleave import interleave
from llama_ssp.config.machines import hardware
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.machines.machine import THIS_MACHINE, machine_of_run
from llama_ssp.config.schema import (
    MODEL_DRAFT,
    DeviceKind,
    DrafterConfig,
    DraftLayout,
    DraftPlacement,
    ModelConfig,
    ModelShape,
    PlacementConfig,
    RunConfig,
    SamplingConfig,
    SpeculationConfig,
    SyntheticConfig,
    VerificationConfig,
    WeightsKind,
)
from llama_ssp.config.tasks import GenerateConfig
from llama_ssp.distributed.world import World, start
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import Request
from llama_ssp.planning.timing import timing
from llama_ssp.session.checkpoints import find_sources
from llama_ssp.session.draft_length import settle_overlap
from llama_ssp.session.loading import Models, build_decoder, load_models
from llama_ssp.session.prompts import encode
from llama_ssp.tasks.benchmark import cut
from llama_ssp.tasks.dry_run import job_of_run

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, NEW_TOKENS = 24, 64
WIDTH, TARGET_LAYERS, HEAD_DIM = 512, 20, 64
VOCAB_SIZE, CONTEXT = 4096, 1024


@dataclass(kw_only=True)
class Candidate:
    """A decoder and what each of its counted repetitions has yielded."""

    world: World
    decoder: Decoder
    prompts: Sequence[tuple[int, ...]]
    overlaps: bool
    num_draft_tokens: int
    yields: list[dict[str, float]] = field(default_factory=list)

    def request(self, repetition: int) -> Request:
        """What a repetition decodes."""
        prompt = self.prompts[repetition % len(self.prompts)]
        return Request(index=0, sample=0, prompt_ids=prompt, max_new_tokens=NEW_TOKENS)

    def run(self, repetition: int) -> float:
        """Decode one prompt, all ranks beginning together; returns milliseconds per token."""
        self.world.comm.barrier()
        if repetition == 0:
            self.decoder.rounds_s = self.decoder.clock.waited_s = 0.0
        seconds, num_rounds, (done,) = decode_once(self.decoder, [self.request(repetition)], seed=repetition + 1)
        counted = [
            (accepted, examined)
            for accepted, examined in zip(done.accepted_lengths, done.examined_lengths, strict=True)
            if examined
        ]
        if repetition >= 0:
            self.yields.append({
                "num_tokens": len(done.token_ids) - 1, "num_rounds": num_rounds,
                "num_accepted": sum(accepted for accepted, _ in counted),
                "num_examined": sum(examined for _, examined in counted),
                "round_s": seconds / num_rounds,
                "draft_s": done.part_s["draft"] / num_rounds, "verify_s": done.part_s["verify"] / num_rounds,
            })  # fmt: skip
        return 1e3 * seconds / (len(done.token_ids) - 1)

    def figures(self) -> Figures:
        """Medians of times, sums of all else, and the idle shares of all ranks."""
        rounds_s, waited_s = self.decoder.rounds_s, self.decoder.clock.waited_s
        shares = self.world.comm.gather_text(json.dumps(waited_s / rounds_s if rounds_s else 0.0))
        return Figures(
            overlaps=self.overlaps, num_draft_tokens=self.num_draft_tokens, waits=bool(self.decoder.round.waits),
            idle_shares=[json.loads(share) for share in shares],
            **{
                name: (statistics.median if name.endswith("_s") else sum)(each[name] for each in self.yields)
                for name in self.yields[0]
            },  # type: ignore[arg-type]
        )  # fmt: skip


def shape(num_layers: int) -> ModelShape:
    """A Llama shape of the benchmark's width."""
    return ModelShape(
        model_type="llama", num_hidden_layers=num_layers, hidden_size=WIDTH, num_attention_heads=WIDTH // HEAD_DIM,
        num_key_value_heads=WIDTH // HEAD_DIM, head_dim=HEAD_DIM, intermediate_size=4 * WIDTH, vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip


def config_of(
    *, draft_layers: int, agreement: float, quantization: str, kind: DraftLayout, num_draft_tokens: int = 4,
    overlaps: bool = False,
) -> RunConfig:  # fmt: skip
    """The run of a candidate; nothing is written into its folder."""
    draft = ModelConfig(name="draft", shape=shape(draft_layers), quantization=quantization)
    return RunConfig(
        task=GenerateConfig(),
        model=ModelConfig(name="target", shape=shape(TARGET_LAYERS), quantization=quantization),
        draft=DrafterConfig(kind=MODEL_DRAFT, model=draft),
        placement=PlacementConfig(draft=DraftPlacement(kind=kind)),
        sampling=SamplingConfig(temperature=0.8),
        verification=VerificationConfig(),
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens, overlap=overlaps),
        weights=WeightsKind.synthetic,
        synthetic=SyntheticConfig(agreement=agreement),
        device=DeviceKind.cpu,
        ignore_eos=True,
        run_dir="outputs",
    )


def candidates(
    models: Models, world: World, config: RunConfig, *, lengths: Sequence[int], modes: Sequence[bool], num_prompts: int
) -> dict[str, Candidate]:
    """One for each K and mode."""
    prompts = cut(encode(TEXT, models.tokenizer, chat=False), num_prompts=num_prompts, num_tokens=PROMPT_TOKENS)
    found = {}
    for overlaps in modes:
        for number in lengths:
            speculation = replace(config.speculation, num_draft_tokens=number, overlap=overlaps)
            own = replace(config, speculation=speculation)
            each = Candidate(
                world=world, decoder=build_decoder(models, own, speculative=True), prompts=prompts, overlaps=overlaps,
                num_draft_tokens=number,
            )  # fmt: skip
            each.decoder.make_room([each.request(0)])
            settle_overlap(each.decoder, own, comm=world.comm, num_slots=PROMPT_TOKENS + NEW_TOKENS // 2)
            found[f"{'overlapped' if overlaps else 'sequential'} K={number}"] = each
    return found


def matched_layers(world: World, quantization: str) -> int:
    """The draft's layers for which K draft steps take as long as the target's forward of K positions.

    A draft of some layers is timed; the time of a step is taken to be proportional to the layers and the head.
    """
    kind = DraftLayout.own_gpu
    times = {}
    for layers in (2, 5):
        config = config_of(
            draft_layers=layers, agreement=0.8, quantization=quantization, kind=kind, num_draft_tokens=MATCHED_K,
            overlaps=True,
        )  # fmt: skip
        models = load_models(config, world, find_sources(config, world))
        (found,) = candidates(models, world, config, lengths=[MATCHED_K], modes=[True], num_prompts=4).values()
        with torch.inference_mode():
            for repetition in range(-1, 5):
                found.run(repetition)
        done = found.figures()
        work = [(1 - share) * done.round_s for share in done.idle_shares]
        times[layers] = work
    slope = (times[5][1] - times[2][1]) / 3
    return max(1, round(2 + (times[2][0] - times[2][1]) / slope))


@torch.inference_mode()
def measure_group(file: Path, arguments: argparse.Namespace) -> None:
    """Measure on as many ranks as there are, all of which call this; the first one writes the file."""
    with start(device=DeviceKind.cpu, timeout_s=600) as world:
        is_apart = world.comm.size > 1
        quantization: str = arguments.quantization
        layers = arguments.draft_layers or (matched_layers(world, quantization) if is_apart else TARGET_LAYERS // 4)
        layers = int(world.comm.broadcast_text(str(layers), src=0))
        kind = DraftLayout.own_gpu if is_apart else DraftLayout.one_rank
        config = config_of(draft_layers=layers, agreement=arguments.agreement, quantization=quantization, kind=kind)
        models = load_models(config, world, find_sources(config, world))
        modes = (True, False) if is_apart else (False,)
        found = candidates(
            models, world, config, lengths=arguments.lengths, modes=modes, num_prompts=arguments.repetitions
        )
        callables = {name: each.run for name, each in found.items()}
        interleave(callables, num_repetitions=arguments.repetitions)
        figures = [asdict(each.figures()) for each in found.values()]
        if world.comm.rank == 0:
            file.write_text(json.dumps({"draft_layers": layers, "figures": figures}))


def launch(num_ranks: int, arguments: argparse.Namespace, *, draft_layers: int) -> tuple[int, list[Figures]]:
    """Start a group of ranks, two threads in all, and read what its first one has measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        own = ["-m", "benchmarks.overlap", "--group", str(file), "--repetitions", str(arguments.repetitions)]
        own += ["--agreement", str(arguments.agreement), "--draft-layers", str(draft_layers)]
        own += ["--quantization", arguments.quantization, "--lengths", *map(str, arguments.lengths)]
        environment = os.environ | {"OMP_NUM_THREADS": str(2 // num_ranks)}
        command = [sys.executable, *(ranks if num_ranks > 1 else []), *own]
        subprocess.run(command, cwd=ROOT, check=True, env=environment)
        read = json.loads(file.read_text())
        return read["draft_layers"], [Figures(**each) for each in read["figures"]]


def forecasts(found: Comparison) -> list[Figures]:
    """The candidates of two ranks with what a plan expects of them, on a machine that was measured."""
    if THIS_MACHINE not in hardware.names():
        return found.apart
    machine = machine_of_run(hardware.load(THIS_MACHINE), 2)

    def config(each: Figures) -> RunConfig:
        return config_of(
            draft_layers=found.draft_layers, agreement=found.agreement, quantization=found.quantization,
            kind=DraftLayout.own_gpu, num_draft_tokens=each.num_draft_tokens, overlaps=each.overlaps,
        )  # fmt: skip

    return [
        replace(each, forecast_ms=forecast_ms(config(each), machine, acceptance=found.acceptance))
        for each in found.apart
    ]


def forecast_ms(config: RunConfig, machine: HardwareConfig, *, acceptance: float) -> float:
    """What a plan expects of a token after the first, on two ranks."""
    job = job_of_run(config, world_size=2, prompt_tokens=PROMPT_TOKENS, device=machine.device)
    timed = timing(replace(job, acceptance=acceptance, max_new_tokens=NEW_TOKENS), machine)
    assert timed.speculative_run_s, "there is a draft"
    return 1e3 * (timed.speculative_run_s * NEW_TOKENS - timed.prefill_s) / (NEW_TOKENS - 1)


def main() -> None:
    """Measure on two ranks and on one, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--quantization", default="int4_weight_only", help="of both models; none is fp32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[*range(1, 9)])
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=0, help="0 chooses them so that K = 4 steps fit")
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/overlap.jsonl")
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if arguments.group:
        measure_group(arguments.group, arguments)
        return
    console = Console(width=150)
    layers, apart = launch(2, arguments, draft_layers=arguments.draft_layers)
    _, together = launch(1, arguments, draft_layers=layers)
    found = Comparison(
        agreement=arguments.agreement, quantization=arguments.quantization, width=WIDTH, target_layers=TARGET_LAYERS,
        draft_layers=layers, apart=apart, together=together,
    )  # fmt: skip
    found = replace(found, apart=forecasts(found))
    console.print(
        f"{TARGET_LAYERS} and {layers} layers of width {WIDTH}, quantization {arguments.quantization}, agreement "
        f"{arguments.agreement:g}"
    )
    console.print(table(found))
    console.print(summary(found))
    if arguments.store:
        console.print(f"stored in {store('overlap', found.row())}")


if __name__ == "__main__":
    main()
