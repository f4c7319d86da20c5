"""What a token costs behind a longer context, and late in a longer text: `python -m benchmarks.lengths`.

The shipped pair, fp32, one rank, plain and speculative in turns. Behind a context: a few tokens after prompts of many
lengths, prefill left out. In a text: windows of one long completion of a short prompt. A round's time is taken as it
is; ms/token is that time over the tokens of a round, of which the mean over all places is taken, so that a passage
that is easy to draft does not look like a cheap length. `readme` draws the stored row.

Two controls tell what a curve is made of. The same text with all slots read in every round: what grows there is not
the reading of keys and values. Rounds after pauses in which nothing runs: on a shared processor others push the models
out of its cache meanwhile, and a round that takes longer because it reads more suffers from that as well.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.curves import Quadratic, fit
from benchmarks.timing import store
from llama_ssp import Pair, load
from llama_ssp.calibration.interleave import interleave
from llama_ssp.config.schema import Dtype, SamplingConfig, SpeculationConfig
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import Request
from llama_ssp.reports.charts import COLOURS, SOFT, Chart
from llama_ssp.reports.plots import sheet
from llama_ssp.reports.records import PLAIN, SPECULATIVE
from llama_ssp.session.loading import build_decoder
from llama_ssp.session.prompts import encode
from llama_ssp.tasks.benchmark import cut

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
MODES = PLAIN, SPECULATIVE
PROMPT_TOKENS = 16
WINDOW = 64
CONTEXT, TEXT, ALL_READ, PAUSE = "context", "text", "text, all slots read", "pause"
TITLES = {
    CONTEXT: "Behind a context",
    TEXT: "In the course of a text",
    ALL_READ: "The same, all slots read in every round",
    PAUSE: "After a pause before every round",
}
X_LABELS = {CONTEXT: "tokens of context", TEXT: "tokens of text", ALL_READ: "tokens of text", PAUSE: "pause, ms"}
Measured = tuple[float, float]
"""Milliseconds of a round, and tokens that it yielded."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        contexts: lengths of the prompts.
        num_new_tokens: tokens behind each of them, and with each pause.
        num_windows: windows of the long text.
        pauses_ms: milliseconds before each round.
        paused_context: length of the prompt there.
    """

    contexts: tuple[int, ...]
    num_new_tokens: int
    num_windows: int
    pauses_ms: tuple[float, ...] = (0, 0.5, 1, 1.5, 2, 3, 4)
    paused_context: int = 1024


FULL = Sizes(contexts=(16, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1900), num_new_tokens=48, num_windows=28)
QUICK = Sizes(contexts=(16, 32, 64, 96, 128), num_new_tokens=12, num_windows=5, paused_context=16)


@torch.inference_mode()
def rounds_of(
    decoder: Decoder, prompt: tuple[int, ...], *, num_new_tokens: int, seed: int, pause_ms: float = 0
) -> list[Measured]:
    """Milliseconds and new tokens of every round of a completion, its prefill and all pauses left out."""
    decoder.seed = seed
    rounds = []
    started = None
    for updates in decoder.run([Request(index=0, prompt_ids=prompt, max_new_tokens=num_new_tokens)]):
        ended = time.perf_counter()
        if started is not None:
            rounds.append((1e3 * (ended - started), float(len(updates[0].new_ids))))
        while time.perf_counter() < ended + pause_ms / 1e3:
            pass
        started = time.perf_counter()
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

    def rounds(
        decoder: Decoder, repetition: int, *, prompt_tokens: int, num_new_tokens: int, pause_ms: float = 0
    ) -> list[Measured]:
        """All but the last, whose tokens the length limit may have cut."""
        (prompt,) = cut(text, num_prompts=1, num_tokens=prompt_tokens)
        seed = repetition + 1
        return rounds_of(decoder, prompt, num_new_tokens=num_new_tokens, seed=seed, pause_ms=pause_ms)[:-1]

    def behind(decoder: Decoder, repetition: int) -> list[Measured]:
        """A point for every context in each repetition, so that they share the machine's mood."""
        new = sizes.num_new_tokens
        return [
            typical(rounds(decoder, repetition, prompt_tokens=length, num_new_tokens=new)) for length in sizes.contexts
        ]

    def in_text(decoder: Decoder, repetition: int) -> list[Measured]:
        new = sizes.num_windows * WINDOW
        return windows(rounds(decoder, repetition, prompt_tokens=PROMPT_TOKENS, num_new_tokens=new), sizes.num_windows)

    def after(decoder: Decoder, repetition: int) -> list[Measured]:
        """A point for every pause."""
        length, new = sizes.paused_context, sizes.num_new_tokens
        return [
            typical(rounds(decoder, repetition, prompt_tokens=length, num_new_tokens=new, pause_ms=pause))
            for pause in sizes.pauses_ms
        ]

    def kept(name: str, points: Callable[[int], list[Measured]], repetition: int) -> float:
        measured = points(repetition)
        if repetition >= 0:
            seen.setdefault(name, []).append(measured)
        return sum(ms for ms, _ in measured)

    candidates: dict[str, Callable[[int], float]] = {}
    for mode in MODES:
        decoder = decoder_of(pair, mode, num_draft_tokens)
        reading_all = decoder_of(pair, mode, num_draft_tokens, all_read=True)
        kinds = {
            CONTEXT: partial(behind, decoder), TEXT: partial(in_text, decoder), ALL_READ: partial(in_text, reading_all),
            PAUSE: partial(after, decoder),
        }  # fmt: skip
        for kind, points in kinds.items():
            name = f"{kind}, {mode}"
            candidates[name] = partial(kept, name, points)
    interleave(candidates, num_repetitions=num_repetitions)
    return {
        "target": "tiny",
        "draft": "tiny-draft",
        "num_draft_tokens": num_draft_tokens,
        "num_threads": torch.get_num_threads(),
        "repetitions": num_repetitions,
        "series": {name: _series(_places(name, sizes), repetitions) for name, repetitions in seen.items()},
    }


def _places(name: str, sizes: Sizes) -> list[float]:
    """Where each point stands: the pause, or the middle of what was decoded for it."""
    if name.startswith(PAUSE):
        return list(sizes.pauses_ms)
    if name.startswith(CONTEXT):
        return [length + sizes.num_new_tokens / 2 for length in sizes.contexts]
    return [PROMPT_TOKENS + WINDOW * (number + 0.5) for number in range(sizes.num_windows)]


def decoder_of(pair: Pair, mode: str, num_draft_tokens: int, *, all_read: bool = False) -> Decoder:
    """A decoder, plain or speculative, which reads as many slots as it needs, or in every round all that there are."""
    config = replace(
        pair.config,
        sampling=SamplingConfig(temperature=0.8),
        speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
        ignore_eos=True,
    )
    decoder = build_decoder(pair.models, config, speculative=mode == SPECULATIVE)
    if all_read:
        decoder.bucket_step = pair.models.target.max_position_embeddings
    return decoder


def _series(places: list[float], repetitions: Sequence[Sequence[Measured]]) -> dict[str, object]:
    """Medians over repetitions at every place, ms/token, and the curve through them."""
    points = list(zip(*repetitions, strict=True))
    round_ms = [statistics.median(ms for ms, _ in measured) for measured in points]
    yielded = [statistics.mean(tokens for _, tokens in measured) for measured in points]
    per_round = statistics.mean(yielded)
    ms_per_token = [ms / per_round for ms in round_ms]
    return {
        "places": places,
        "round_ms": round_ms,
        "tokens_per_round": yielded,
        "ms_per_token": ms_per_token,
        "fit": asdict(fit(list(zip(places, ms_per_token, strict=True)))),
    }


def draw(row: dict[str, object]) -> str:
    """A stored row as a file."""
    return sheet(charts(row))


def charts(row: dict[str, object]) -> list[Chart]:
    """A chart of each kind on one scale; dots are medians, lines the fitted curves."""
    series = row["series"]
    assert isinstance(series, dict)
    highest = max(max(each["ms_per_token"]) for each in series.values())
    return [_chart({mode: series[f"{kind}, {mode}"] for mode in MODES}, kind, highest) for kind in TITLES]


def _chart(named: dict[str, Any], kind: str, highest_y: float) -> Chart:
    highest_x = max(named[PLAIN]["places"])
    chart = Chart(
        title=TITLES[kind], x_label=X_LABELS[kind], y_label="ms/token", highest_x=highest_x, highest_y=highest_y
    )
    for colour, (mode, each) in zip((SOFT, COLOURS[0]), named.items(), strict=True):
        curve = Quadratic(**each["fit"])
        first, last = each["places"][0], each["places"][-1]
        places = [first + (last - first) * step / 20 for step in range(21)]
        chart.line([(place, curve.at(place)) for place in places], colour, name=mode)
        for place, ms in zip(each["places"], each["ms_per_token"], strict=True):
            chart.dot(place, ms, colour, says=f"{mode}, {place:g} {X_LABELS[kind]}: {ms:.3f} ms/token")
    return chart


def show(row: dict[str, object], console: Console) -> None:
    """Print the ends of every series and its curve."""
    table = Table(title="ms/token = a + b n + c n^2", title_justify="left", show_edge=False)
    for column in ("series", "first", "last", "growth", "what c says"):
        table.add_column(column, justify="left" if column in {"series", "what c says"} else "right")
    series = row["series"]
    assert isinstance(series, dict)
    for name, each in series.items():
        curve, ms = Quadratic(**each["fit"]), each["ms_per_token"]
        verdict = "" if name.startswith(PAUSE) else curve.verdict
        table.add_row(name, f"{ms[0]:.3f}", f"{ms[-1]:.3f}", f"{curve.growth:+.1%}", verdict)
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
