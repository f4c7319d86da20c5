"""Drafting that overlaps verification, against rounds one after the other: `python -m benchmarks.overlap`.

A synthetic pair whose K draft steps take about as long as a forward of the target, on two processes with a thread each:
the target on one, the draft on the other. All candidates (overlapped or not, K from 1 to 8) are in memory at once and
take turns on the same prompts. Beside them stands one process with two threads that holds both models. Times are per
token after the first, on rank 0. The renewal model (`planning.acceptance.rounds`) is given the measured acceptance and
the times of sequential rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_engine import TEXT, decode_once
from benchmarks.timing import store
from llama_ssp.calibration.interleave import interleave
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
from llama_ssp.config.tasks.generate import GenerateConfig
from llama_ssp.distributed.world import World, start
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import Request
from llama_ssp.planning.acceptance.rounds import overlapped_tokens, tokens_per_round
from llama_ssp.session.checkpoints import find_sources
from llama_ssp.session.loading import Models, build_decoder, load_models
from llama_ssp.session.prompts import encode
from llama_ssp.tasks.benchmark import cut

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, NEW_TOKENS = 24, 64
WIDTH, TARGET_LAYERS, HEAD_DIM = 512, 20, 64
MATCHED_K = 4
VOCAB_SIZE, CONTEXT = 4096, 1024


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Sums over the counted repetitions of a candidate, after the prefill; `idle_shares` are of each rank.

    `draft_s` and `verify_s` are the parts of its rounds on the target's rank.
    """

    name: str
    overlaps: bool
    num_draft_tokens: int
    seconds: float
    num_tokens: int
    num_rounds: int
    num_accepted: int
    num_examined: int
    draft_s: float
    verify_s: float
    idle_shares: list[float]

    @property
    def ms_per_token(self) -> float:
        """The mean."""
        return 1e3 * self.seconds / self.num_tokens


@dataclass(kw_only=True)
class Candidate:
    """A decoder and what its counted repetitions have yielded."""

    world: World
    decoder: Decoder
    prompts: Sequence[tuple[int, ...]]
    overlaps: bool
    num_draft_tokens: int
    sums: dict[str, float] = field(default_factory=dict)

    def run(self, repetition: int) -> float:
        """Decode one prompt, all ranks beginning together; returns milliseconds per token."""
        self.world.comm.barrier()
        if repetition == 0:
            self.decoder.rounds_s = self.decoder.clock.waited_s = 0.0
        prompt = self.prompts[repetition % len(self.prompts)]
        request = Request(index=0, sample=0, prompt_ids=prompt, max_new_tokens=NEW_TOKENS)
        seconds, num_rounds, (done,) = decode_once(self.decoder, [request], seed=repetition + 1)
        counted = [
            (accepted, examined)
            for accepted, examined in zip(done.accepted_lengths, done.examined_lengths, strict=True)
            if examined
        ]
        values = {
            "seconds": seconds, "num_tokens": len(done.token_ids) - 1, "num_rounds": num_rounds,
            "num_accepted": sum(accepted for accepted, _ in counted),
            "num_examined": sum(examined for _, examined in counted),
            "draft_s": done.part_s["draft"], "verify_s": done.part_s["verify"],
        }  # fmt: skip
        if repetition >= 0:
            self.sums = {name: self.sums.get(name, 0) + value for name, value in values.items()}
        return 1e3 * seconds / values["num_tokens"]

    def figures(self, name: str) -> Figures:
        """Gather the idle shares of all ranks."""
        rounds_s, waited_s = self.decoder.rounds_s, self.decoder.clock.waited_s
        shares = self.world.comm.gather_text(json.dumps(waited_s / rounds_s if rounds_s else 0.0))
        return Figures(
            name=name, overlaps=self.overlaps, num_draft_tokens=self.num_draft_tokens,
            idle_shares=[json.loads(share) for share in shares], **self.sums,  # type: ignore[arg-type]
        )  # fmt: skip


def shape(num_layers: int) -> ModelShape:
    """A Llama shape of the benchmark's width."""
    return ModelShape(
        model_type="llama", num_hidden_layers=num_layers, hidden_size=WIDTH, num_attention_heads=WIDTH // HEAD_DIM,
        num_key_value_heads=WIDTH // HEAD_DIM, head_dim=HEAD_DIM, intermediate_size=4 * WIDTH, vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
    )  # fmt: skip


def config_of(
    *, draft_layers: int, agreement: float, kind: DraftLayout, num_draft_tokens: int = 4, overlaps: bool = False
) -> RunConfig:
    """The run of a candidate; nothing is written into its folder."""
    draft = ModelConfig(name="draft", shape=shape(draft_layers))
    return RunConfig(
        task=GenerateConfig(),
        model=ModelConfig(name="target", shape=shape(TARGET_LAYERS)),
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
            decoder = build_decoder(models, replace(config, speculation=speculation), speculative=True)
            name = f"{'overlapped' if overlaps else 'sequential'} K={number}"
            found[name] = Candidate(
                world=world, decoder=decoder, prompts=prompts, overlaps=overlaps, num_draft_tokens=number
            )
    return found


def matched_layers(world: World) -> int:
    """The draft's layers for which K draft steps take as long as the target's forward of K positions.

    A draft of some layers is timed; the time of a step is taken to be proportional to the layers and the head.
    """
    kind = DraftLayout.own_gpu
    times = {}
    for layers in (2, 5):
        config = config_of(draft_layers=layers, agreement=0.8, kind=kind, num_draft_tokens=MATCHED_K, overlaps=True)
        models = load_models(config, world, find_sources(config, world))
        (found,) = candidates(models, world, config, lengths=[MATCHED_K], modes=[True], num_prompts=4).values()
        with torch.inference_mode():
            for repetition in range(-2, 5):
                found.run(repetition)
        done = found.figures("")
        work = [(1 - share) * found.decoder.rounds_s / done.num_rounds for share in done.idle_shares]
        times[layers] = work
    slope = (times[5][1] - times[2][1]) / 3
    return max(1, round(2 + (times[2][0] - times[2][1]) / slope))


@torch.inference_mode()
def measure_group(file: Path, arguments: argparse.Namespace) -> None:
    """Measure on as many ranks as there are, all of which call this; the first one writes the file."""
    with start(device=DeviceKind.cpu, timeout_s=600) as world:
        is_apart = world.comm.size > 1
        layers = arguments.draft_layers or (matched_layers(world) if is_apart else TARGET_LAYERS // 4)
        layers = int(world.comm.broadcast_text(str(layers), src=0))
        kind = DraftLayout.own_gpu if is_apart else DraftLayout.one_rank
        config = config_of(draft_layers=layers, agreement=arguments.agreement, kind=kind)
        models = load_models(config, world, find_sources(config, world))
        modes = (True, False) if is_apart else (False,)
        found = candidates(
            models, world, config, lengths=arguments.lengths, modes=modes, num_prompts=arguments.repetitions
        )
        callables = {name: each.run for name, each in found.items()}
        interleave(callables, num_repetitions=arguments.repetitions, num_warmup=2)
        figures = [asdict(each.figures(name)) for name, each in found.items()]
        if world.comm.rank == 0:
            file.write_text(json.dumps({"draft_layers": layers, "figures": figures}))


def launch(num_ranks: int, arguments: argparse.Namespace, *, draft_layers: int) -> tuple[int, list[Figures]]:
    """Start a group of ranks, two threads in all, and read what its first one has measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        own = ["-m", "benchmarks.overlap", "--group", str(file), "--repetitions", str(arguments.repetitions)]
        own += ["--agreement", str(arguments.agreement), "--draft-layers", str(draft_layers)]
        own += ["--lengths", *map(str, arguments.lengths)]
        environment = os.environ | {"OMP_NUM_THREADS": str(2 // num_ranks)}
        command = [sys.executable, *(ranks if num_ranks > 1 else []), *own]
        subprocess.run(command, cwd=ROOT, check=True, env=environment)
        read = json.loads(file.read_text())
        return read["draft_layers"], [Figures(**each) for each in read["figures"]]


def acceptance(figures: Sequence[Figures]) -> float:
    """Accepted over examined, over all candidates: a property of the pair."""
    return sum(each.num_accepted for each in figures) / sum(each.num_examined for each in figures)


def modelled_gain(sequential: Figures, accepted: float) -> float:
    """What the renewal model expects of overlapping, from a sequential run's acceptance and parts of a round."""
    number = sequential.num_draft_tokens
    draft_s, verify_s = sequential.draft_s / sequential.num_rounds, sequential.verify_s / sequential.num_rounds
    one_by_one = (draft_s + verify_s) / tokens_per_round(accepted, number)
    return one_by_one / (max(draft_s, verify_s) / overlapped_tokens(accepted, number))


def show(apart: Sequence[Figures], together: Sequence[Figures], console: Console) -> None:
    """Print a line for each K."""
    accepted = acceptance(apart)
    table = Table(title=f"acceptance {accepted:.3f}", title_justify="left", show_edge=False)
    for column in (
        "K", "sequential\nms/token", "draft\nms", "verify\nms", "overlapped\nms/token", "gain", "model",
        "tokens\n/round", "model", "target\nidle", "draft\nidle", "1 process\nms/token",
    ):  # fmt: skip
        table.add_column(column, justify="right", vertical="bottom")
    by_key = {(each.overlaps, each.num_draft_tokens): each for each in apart}
    alone = {each.num_draft_tokens: each for each in together}
    for number in sorted(alone):
        one_by_one, at_once = by_key[False, number], by_key[True, number]
        rounds = one_by_one.num_rounds
        table.add_row(
            str(number), f"{one_by_one.ms_per_token:.2f}", f"{1e3 * one_by_one.draft_s / rounds:.2f}",
            f"{1e3 * one_by_one.verify_s / rounds:.2f}", f"{at_once.ms_per_token:.2f}",
            f"{one_by_one.ms_per_token / at_once.ms_per_token:.2f}x", f"{modelled_gain(one_by_one, accepted):.2f}x",
            f"{at_once.num_tokens / at_once.num_rounds:.2f}", f"{overlapped_tokens(accepted, number):.2f}",
            *(f"{100 * share:.0f} %" for share in at_once.idle_shares), f"{alone[number].ms_per_token:.2f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Measure on two ranks and on one, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--draft-layers", type=int, default=0, help="0 chooses them so that K = 4 steps fit")
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/overlap.jsonl")
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if arguments.group:
        measure_group(arguments.group, arguments)
        return
    console = Console(width=140)
    layers, apart = launch(2, arguments, draft_layers=arguments.draft_layers)
    _, together = launch(1, arguments, draft_layers=layers)
    console.print(f"{TARGET_LAYERS} and {layers} layers of width {WIDTH}")
    show(apart, together, console)
    if arguments.store:
        row = {
            "agreement": arguments.agreement, "draft_layers": layers, "target_layers": TARGET_LAYERS, "width": WIDTH,
            "apart": [asdict(each) for each in apart], "together": [asdict(each) for each in together],
        }  # fmt: skip
        console.print(f"stored in {store('overlap', row)}")


if __name__ == "__main__":
    main()
