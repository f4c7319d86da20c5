"""Drafting that overlaps verification, against rounds one after the other: `python -m benchmarks.overlap --store`.

A synthetic pair on two processes with a thread each: the target on one, the draft on the other. All candidates
(overlapped or not, each K) are in memory at once and take turns on the same prompts; one process with two threads and
both models is measured after them. Times are per token after the first, on rank 0. Weights have 4 bits, so that a
forward computes for longer than it reads: two processes that read all the time slow each other on one memory, which
`--quantization none` shows. The renewal model of `planning.timing` is given the acceptance that was measured, and of a
round one after the other what drafting and verification took.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers

from benchmarks.decoding import TEXT, decode_once, run_config
from benchmarks.measured import Row, group_of_ranks, markdown, store
from llama_ssp.catalogue import ModelConfig, ModelShape
from llama_ssp.planning.acceptance import constant, overlapped_tokens, tokens_per_round
from llama_ssp.planning.timing import OverlappedTime
from llama_ssp.ranks.world import World, start
from llama_ssp.run.calibration.interleave import interleave
from llama_ssp.run.checkpoints import find_sources
from llama_ssp.run.decoders import Models, build_decoder, load_models
from llama_ssp.run.requests import encode
from llama_ssp.run.tasks.benchmark import cut
from llama_ssp.run.tuning import tune
from llama_ssp.settings.schema import (
    DeviceKind,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    RunConfig,
    SpeculationConfig,
    SyntheticConfig,
    WeightsKind,
)
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.engine.state import Request

PROMPT_TOKENS, NEW_TOKENS = 24, 64
WIDTH, TARGET_LAYERS, DRAFT_LAYERS, HEAD_DIM = 512, 20, 8, 64
MATCHED_K = 4
"""As many draft steps take about as long as a forward of the target."""


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
        """The request of a repetition."""
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

    def figures(self) -> Row:
        """Medians of times, sums of all else, and the idle shares of all ranks."""
        rounds_s, waited_s = self.decoder.rounds_s, self.decoder.clock.waited_s
        shares = self.world.comm.gather_text(json.dumps(waited_s / rounds_s if rounds_s else 0.0))
        return {
            "overlaps": self.overlaps, "num_draft_tokens": self.num_draft_tokens,
            "idle_shares": [json.loads(share) for share in shares],
            **{
                name: (statistics.median if name.endswith("_s") else sum)(each[name] for each in self.yields)
                for name in self.yields[0]
            },
        }  # fmt: skip


def shape(num_layers: int) -> ModelShape:
    """A Llama shape of the benchmark's width."""
    return ModelShape(
        model_type="llama", num_hidden_layers=num_layers, hidden_size=WIDTH, num_attention_heads=WIDTH // HEAD_DIM,
        num_key_value_heads=WIDTH // HEAD_DIM, head_dim=HEAD_DIM, intermediate_size=4 * WIDTH, vocab_size=4096,
        max_position_embeddings=1024,
    )  # fmt: skip


def config_of(arguments: argparse.Namespace, kind: DraftLayout) -> RunConfig:
    """The run of both models."""
    entries = {
        name: ModelConfig(name=name, shape=shape(layers), quantization=arguments.quantization)
        for name, layers in (("target", TARGET_LAYERS), ("draft", arguments.draft_layers))
    }
    return run_config(
        entries["target"], entries["draft"], placement=PlacementConfig(draft=DraftPlacement(kind=kind)),
        weights=WeightsKind.synthetic, synthetic=SyntheticConfig(agreement=arguments.agreement),
    )  # fmt: skip


def make_candidate(
    models: Models, world: World, config: RunConfig, *, overlaps: bool, num_draft_tokens: int, num_prompts: int
) -> Candidate:
    """One K in one way."""
    speculation = SpeculationConfig(num_draft_tokens=num_draft_tokens, overlap=overlaps)
    own = replace(config, speculation=speculation)
    prompts = cut(encode(TEXT, models.tokenizer), num_prompts=num_prompts, num_tokens=PROMPT_TOKENS)
    found = Candidate(
        world=world, decoder=build_decoder(models, own, speculative=True), prompts=prompts, overlaps=overlaps,
        num_draft_tokens=num_draft_tokens,
    )  # fmt: skip
    found.decoder.make_room([found.request(0)])
    tune(found.decoder, own, comm=world.comm, num_slots=PROMPT_TOKENS + NEW_TOKENS // 2)
    return found


@torch.inference_mode()
def measure_group(file: Path, arguments: argparse.Namespace) -> None:
    """Measure on as many ranks as there are, all of which call this; the first one writes the file."""
    with start(device=DeviceKind.cpu, timeout_s=600) as world:
        is_apart = world.comm.size > 1
        config = config_of(arguments, DraftLayout.own_gpu if is_apart else DraftLayout.one_rank)
        models = load_models(config, world, find_sources(config, world))
        found = [
            make_candidate(
                models, world, config, overlaps=overlaps, num_draft_tokens=number, num_prompts=arguments.repetitions
            )
            for overlaps in ((True, False) if is_apart else (False,))
            for number in arguments.lengths
        ]
        turns = {f"{each.overlaps} {each.num_draft_tokens}": each.run for each in found}
        interleave(turns, num_repetitions=arguments.repetitions)
        figures = [each.figures() for each in found]
        if world.comm.rank == 0:
            file.write_text(json.dumps(figures))


def launch(num_ranks: int, arguments: argparse.Namespace) -> list[Row]:
    """Measure on a group of ranks, with two threads in all."""
    words = ["--agreement", str(arguments.agreement), "--draft-layers", str(arguments.draft_layers)]
    words += ["--quantization", arguments.quantization, "--repetitions", str(arguments.repetitions)]
    words += ["--lengths", *map(str, arguments.lengths)]
    return group_of_ranks("benchmarks.overlap", num_ranks, words, OMP_NUM_THREADS=str(2 // num_ranks))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A stored row: two ranks in both ways, and one process with the threads of both."""

    row: Row

    @property
    def acceptance(self) -> float:
        """Accepted over examined, of all candidates: a property of the pair."""
        apart = self.row["apart"]
        return float(sum(each["num_accepted"] for each in apart) / sum(each["num_examined"] for each in apart))

    def at(self, num_draft_tokens: int, *, overlaps: bool) -> Row:
        """The candidate of a K."""
        wanted = num_draft_tokens, overlaps
        return next(each for each in self.row["apart"] if (each["num_draft_tokens"], each["overlaps"]) == wanted)

    def best_of(self, overlaps: bool, /) -> Row:
        """The fastest K of one way."""
        way: list[Row] = [each for each in self.row["apart"] if each["overlaps"] is overlaps]
        return min(way, key=ms_per_token)

    def gain(self, num_draft_tokens: int) -> float:
        """Of overlapping, as measured."""
        before, after = (self.at(num_draft_tokens, overlaps=each) for each in (False, True))
        return ms_per_token(before) / ms_per_token(after)

    def modelled_gain(self, num_draft_tokens: int) -> float:
        """The same by the renewal model."""
        k, acceptance, before = num_draft_tokens, self.acceptance, self.at(num_draft_tokens, overlaps=False)
        time = OverlappedTime(draft_s=before["draft_s"], forward_s=before["verify_s"])
        one_by_one_s = (time.draft_s + time.forward_s) / tokens_per_round(constant(acceptance, k))
        return one_by_one_s / (time.round_s / overlapped_tokens(acceptance, k))


def ms_per_token(figures: Row) -> float:
    """Of a median round."""
    return 1e3 * float(figures["round_s"] * figures["num_rounds"] / figures["num_tokens"])


def text(rows: Sequence[Row]) -> str:
    """The newest row of each agreement, by acceptance."""
    found = sorted(
        (Comparison(row=row) for row in {row["agreement"]: row for row in rows}.values()),
        key=lambda each: each.acceptance,
    )
    row = rows[-1]
    lengths = sorted({each["num_draft_tokens"] for pair in found for each in pair.row["apart"]})
    heads = ["acceptance", "draft + verify, ms", "one by one", "overlapped", "target idle", "draft idle"]
    heads += ["best one by one", "best overlapped", "gain", "one process"]
    by_length = []
    for each in found:
        known = {candidate["num_draft_tokens"] for candidate in each.row["apart"]}
        # Of earlier versions, whose rows could wait for a block after a rejection: other rounds than those of today.
        known -= {candidate["num_draft_tokens"] for candidate in each.row["apart"] if candidate.get("waits")}
        gains = (f"{each.gain(k):.2f}x ({each.modelled_gain(k):.2f}x)" if k in known else "-" for k in lengths)
        by_length.append([f"{each.acceptance:.2f}", *gains])
    return (
        f"Synthetic pairs of {row['target_layers']} and {row['draft_layers']} layers of width {row['width']} in "
        f"{row['quantization']}, on two processes with a thread each of an {row['processor']}. All ways took turns on "
        f"the same prompts; times are per token, at K = {MATCHED_K} unless another is named.\n\n"
        f"{markdown(heads, [_line(each) for each in found])}\n\nThe gain at each K, and by the model in brackets:\n\n"
        f"{markdown(['acceptance', *(f'K = {k}' for k in lengths)], by_length)}"
    )


def _line(found: Comparison) -> list[str]:
    before, after = (found.at(MATCHED_K, overlaps=overlaps) for overlaps in (False, True))
    (alone,) = [each for each in found.row["together"] if each["num_draft_tokens"] == MATCHED_K]
    best = [found.best_of(overlaps) for overlaps in (False, True)]
    return [
        f"{found.acceptance:.2f}",
        f"{1e3 * before['draft_s']:.1f} + {1e3 * before['verify_s']:.1f}",
        f"{ms_per_token(before):.2f}",
        f"{ms_per_token(after):.2f}",
        *(f"{share:.0%}" for share in after["idle_shares"]),
        *(f"{ms_per_token(each):.2f} (K = {each['num_draft_tokens']})" for each in best),
        f"**{ms_per_token(best[0]) / ms_per_token(best[1]):.2f}x**",
        f"{ms_per_token(alone):.2f}",
    ]


def main() -> None:
    """Measure on two ranks and on one, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--quantization", default="int4_weight_only", help="of both models; none is fp32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[*range(1, 9)], help=f"each K; {MATCHED_K} is one")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=DRAFT_LAYERS)
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/overlap.jsonl")
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if arguments.group:
        measure_group(arguments.group, arguments)
        return
    row: Row = {
        "agreement": arguments.agreement, "quantization": arguments.quantization, "width": WIDTH,
        "target_layers": TARGET_LAYERS, "draft_layers": arguments.draft_layers,
        "apart": launch(2, arguments), "together": launch(1, arguments),
    }  # fmt: skip
    print(text([row | {"processor": "this machine"}]))
    if arguments.store:
        store("overlap", row)


if __name__ == "__main__":
    main()
