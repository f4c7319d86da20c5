"""What a token costs behind a longer context, and late in a longer text: `python -m benchmarks.lengths`.

The shipped pair, fp32, one rank, plain and speculative in turns. Behind a context: a few tokens after prompts of many
lengths, prefill left out. In a text: windows of one long completion of a short prompt. A round's time is taken as it
is; ms/token is that time over the tokens of a round, of which the mean over all lengths is taken, so that a passage
that is easy to draft does not look like a cheap length. `readme` draws the stored row.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.curves import Quadratic, fit
from benchmarks.timing import store
from llama_ssp import Pair, load
from llama_ssp.config.schema import Dtype, SamplingConfig, SpeculationConfig
from llama_ssp.decoding.loop import Decoder
from llama_ssp.decoding.state import Request
from llama_ssp.reports.lines import PLAIN, SPECULATIVE
from llama_ssp.reports.svg import COLOURS, Chart, sheet
from llama_ssp.tasks.benchmark import cut
from llama_ssp.tasks.loading import build_decoder
from llama_ssp.tasks.prompts import encode
from llama_ssp.tasks.turns import in_turns

TEXT = '''\
import os
import sys


class Stack:
    """A list of items, the last one first."""

    def __init__(self, items):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
'''
PROMPT_TOKENS = 16
WINDOW = 64
SERIES = {"context": "tokens of context", "text": "tokens of text"}
Measured = tuple[float, float]
"""Milliseconds of a round, and tokens that it yielded."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths of the prompts, new tokens behind each, and windows of the long text."""

    contexts: tuple[int, ...]
    num_new_tokens: int
    num_windows: int


FULL = Sizes(contexts=(16, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1900), num_new_tokens=48, num_windows=28)
QUICK = Sizes(contexts=(16, 32, 64, 96, 128), num_new_tokens=12, num_windows=5)


@torch.inference_mode()
def rounds_of(decoder: Decoder, prompt: tuple[int, ...], *, num_new_tokens: int, seed: int) -> list[Measured]:
    """Milliseconds and new tokens of every round of a completion, its prefill left out."""
    decoder.seed = seed
    rounds = []
    last = None
    for updates in decoder.run([Request(index=0, prompt_ids=prompt, max_new_tokens=num_new_tokens)]):
        now = time.perf_counter()
        if last is not None:
            rounds.append((1e3 * (now - last), float(len(updates[0].new_ids))))
        last = now
    return rounds


def typical(rounds: Sequence[Measured]) -> Measured:
    """The median time and the mean yield of some rounds."""
    return statistics.median(ms for ms, _ in rounds), statistics.mean(tokens for _, tokens in rounds)


def windows(rounds: Sequence[Measured], num_windows: int) -> list[Measured]:
    """What is typical of the rounds that begin in each WINDOW tokens of a text."""
    parts: list[list[Measured]] = [[] for _ in range(num_windows)]
    place = 1
    for ms, num_tokens in rounds:
        parts[place // WINDOW].append((ms, num_tokens))
        place += int(num_tokens)
    return [typical(part) for part in parts]


def measure(sizes: Sizes, *, num_draft_tokens: int, num_repetitions: int) -> dict[str, object]:
    """Run everything and return the figures."""
    pair = load("tiny", "tiny-draft", dtype=Dtype.fp32)
    text = encode(TEXT, pair.models.tokenizer, chat=False)
    seen: dict[str, list[list[Measured]]] = {}

    def rounds(decoder: Decoder, prompt_tokens: int, num_new_tokens: int, *, seed: int) -> list[Measured]:
        """All but the last, whose tokens the length limit may have cut."""
        (prompt,) = cut(text, num_prompts=1, num_tokens=prompt_tokens)
        return rounds_of(decoder, prompt, num_new_tokens=num_new_tokens, seed=seed)[:-1]

    def context(decoder: Decoder, repetition: int) -> list[Measured]:
        """A point for every context in each repetition, so that they share the machine's mood."""
        return [
            typical(rounds(decoder, length, sizes.num_new_tokens, seed=repetition + 1)) for length in sizes.contexts
        ]

    def in_text(decoder: Decoder, repetition: int) -> list[Measured]:
        found = rounds(decoder, PROMPT_TOKENS, sizes.num_windows * WINDOW, seed=repetition + 1)
        return windows(found, sizes.num_windows)

    def kept(name: str, points: Callable[[int], list[Measured]], repetition: int) -> float:
        measured = points(repetition)
        if repetition >= 0:
            seen.setdefault(name, []).append(measured)
        return sum(ms for ms, _ in measured)

    candidates: dict[str, Callable[[int], float]] = {}
    for mode in (PLAIN, SPECULATIVE):
        decoder = _decoder(pair, mode, num_draft_tokens)
        for kind, points in (("context", context), ("text", in_text)):
            name = f"{kind}, {mode}"
            candidates[name] = partial(kept, name, partial(points, decoder))
    in_turns(candidates, num_repetitions=num_repetitions)
    return {
        "target": "tiny",
        "draft": "tiny-draft",
        "num_draft_tokens": num_draft_tokens,
        "num_threads": torch.get_num_threads(),
        "repetitions": num_repetitions,
        "series": {name: _series(_lengths(name, sizes), repetitions) for name, repetitions in seen.items()},
    }


def _lengths(name: str, sizes: Sizes) -> list[float]:
    """The middle of what was decoded for each point."""
    if name.startswith("context"):
        return [length + sizes.num_new_tokens / 2 for length in sizes.contexts]
    return [PROMPT_TOKENS + WINDOW * (number + 0.5) for number in range(sizes.num_windows)]


def _decoder(pair: Pair, mode: str, num_draft_tokens: int) -> Decoder:
    config = replace(
        pair.config,
        sampling=SamplingConfig(temperature=0.8),
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
        ignore_eos=True,
    )
    return build_decoder(pair.models, config, speculative=mode == SPECULATIVE)


def _series(lengths: list[float], repetitions: Sequence[Sequence[Measured]]) -> dict[str, object]:
    """Medians over repetitions at every length, ms/token, and the curve through them."""
    points = list(zip(*repetitions, strict=True))
    round_ms = [statistics.median(ms for ms, _ in measured) for measured in points]
    yielded = [statistics.mean(tokens for _, tokens in measured) for measured in points]
    per_round = statistics.mean(yielded)
    ms_per_token = [ms / per_round for ms in round_ms]
    return {
        "lengths": lengths,
        "round_ms": round_ms,
        "tokens_per_round": yielded,
        "ms_per_token": ms_per_token,
        "fit": asdict(fit(list(zip(lengths, ms_per_token, strict=True)))),
    }


def draw(row: dict[str, object]) -> str:
    """A stored row as a file: one chart over context, one over text; dots are medians, lines the fitted curves."""
    return sheet([_chart(row, kind) for kind in SERIES])


def _chart(row: dict[str, object], kind: str) -> Chart:
    series = row["series"]
    assert isinstance(series, dict)
    named = {mode: series[f"{kind}, {mode}"] for mode in (PLAIN, SPECULATIVE)}
    highest_y = max(max(each["ms_per_token"]) for each in named.values())
    chart = Chart(
        {"context": "Behind a context", "text": "In the course of a text"}[kind],
        x_label=SERIES[kind], y_label="ms/token", highest_x=max(named[PLAIN]["lengths"]), highest_y=highest_y,
    )  # fmt: skip
    for colour, (mode, each) in zip((COLOURS[5], COLOURS[0]), named.items(), strict=True):
        curve = Quadratic(**each["fit"])
        first, last = each["lengths"][0], each["lengths"][-1]
        places = [first + (last - first) * step / 20 for step in range(21)]
        chart.line([(place, curve.at(place)) for place in places], colour)
        for length, ms in zip(each["lengths"], each["ms_per_token"], strict=True):
            chart.dot(length, ms, colour, says=f"{mode}, {length:.0f} {SERIES[kind]}: {ms:.3f} ms/token")
        chart.legend(mode, colour)
    return chart


def show(row: dict[str, object], console: Console) -> None:
    """Print the ends of every series and its curve."""
    table = Table(title="ms/token = a + b n + c n^2", title_justify="left", show_edge=False)
    for column in ("series", "first", "last", "a", "b x 1000", "what c says"):
        table.add_column(column, justify="left" if column in {"series", "what c says"} else "right")
    series = row["series"]
    assert isinstance(series, dict)
    for name, each in series.items():
        curve, ms = Quadratic(**each["fit"]), each["ms_per_token"]
        figures = [f"{value:.3f}" for value in (ms[0], ms[-1], curve.a, 1e3 * curve.b)]
        table.add_row(name, *figures, curve.verdict)
    console.print(table)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a few short lengths, to see that it runs")
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/lengths.jsonl")
    arguments = parser.parse_args()
    console = Console()
    with console.status("timing"):
        row = measure(
            QUICK if arguments.quick else FULL,
            num_draft_tokens=arguments.num_draft_tokens,
            num_repetitions=arguments.repetitions,
        )
    show(row, console)
    if arguments.store:
        console.print(f"stored in {store('lengths', row)}")


if __name__ == "__main__":
    main()
