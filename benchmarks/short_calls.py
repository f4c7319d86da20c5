"""Ten short calls of the library against a long one, on the shipped pair: `python -m benchmarks.short_calls`.

A pair completes a prompt by 16 tokens ten times, once for each seed, and by 160 tokens once; both take turns. The ratio
of their times per token says what a call costs beyond its rounds: the median over turns, since a shared machine changes
its speed from one turn to the next. Where a short call's time goes comes from the times
that each completion has: to the first token, the parts of the rounds, and the rest of the call.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.timing import Goal, print_goals, store
from llama_ssp import Pair, load

PROMPTS = ("import os\n", "def main():\n", "class Stack:\n")
SHORT, LONG, NUM_CALLS = 16, 160, 10
AT_MOST = 1.3


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Some calls, all with one number of new tokens: milliseconds per token of each of their parts."""

    ms_per_token: float
    parts: Mapping[str, float]


def call(pair: Pair, prompt: str, *, num_new: int, seeds: Iterable[int]) -> Calls:
    """Complete a prompt, once for each seed, and add the times up."""
    parts = dict.fromkeys(("prefill", "draft", "verify", "other of a round", "rest of the call"), 0.0)
    num_tokens, started = 0, time.perf_counter()
    for seed in seeds:
        (done,) = pair.generate(prompt, max_new_tokens=num_new, seed=seed, temperature=0.5)
        times = done.times
        rounds_s = (times.draft_s, times.verify_s, times.other_s)
        for part, seconds in zip(parts, (times.first_token_s, *rounds_s), strict=False):
            parts[part] += seconds
        num_tokens += len(done.token_ids)
    taken_s = time.perf_counter() - started
    parts["rest of the call"] = taken_s - sum(parts.values())
    return Calls(
        ms_per_token=1e3 * taken_s / num_tokens, parts={name: 1e3 * s / num_tokens for name, s in parts.items()}
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians over turns: of short and of long calls, and of the ratio of both in a turn."""

    calls: Mapping[str, Calls]
    ratio: float


def measure(pair: Pair, *, num_repetitions: int) -> Measured:
    """Let short and long calls of each prompt take turns; the first repetition is not counted."""
    taken: dict[str, list[Calls]] = {"short": [], "long": []}
    for repetition in range(num_repetitions + 1):
        for prompt in PROMPTS:
            found = {
                "long": call(pair, prompt, num_new=LONG, seeds=[repetition]),
                "short": call(pair, prompt, num_new=SHORT, seeds=range(repetition, repetition + NUM_CALLS)),
            }
            for name, calls in found.items():
                taken[name] += [calls] if repetition else []
    medians = {
        name: Calls(
            ms_per_token=statistics.median(each.ms_per_token for each in calls),
            parts={part: statistics.median(each.parts[part] for each in calls) for part in calls[0].parts},
        )
        for name, calls in taken.items()
    }
    turns = zip(taken["short"], taken["long"], strict=True)
    return Measured(
        calls=medians, ratio=statistics.median(short.ms_per_token / long.ms_per_token for short, long in turns)
    )


def show(found: Measured, console: Console) -> None:
    """Print the parts, and the goal."""
    table = Table(title="milliseconds per token", title_justify="left", show_edge=False)
    for column in ("", *found.calls):
        table.add_column(column, justify="right" if column else "left")
    for part in found.calls["short"].parts:
        table.add_row(part, *(f"{calls.parts[part]:.3f}" for calls in found.calls.values()))
    table.add_row("all", *(f"{calls.ms_per_token:.3f}" for calls in found.calls.values()))
    console.print(table)
    print_goals(console, [Goal(name="ten short calls against a long one", measured=found.ratio, at_most=AT_MOST)])


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--store", action="store_true", help="append the figures to results/short_calls.jsonl")
    arguments = parser.parse_args()
    console, pair = Console(), load("tiny", "tiny-draft")
    found = measure(pair, num_repetitions=arguments.repetitions)
    show(found, console)
    if arguments.store:
        row = {name: {"ms_per_token": calls.ms_per_token, **calls.parts} for name, calls in found.calls.items()}
        console.print(
            f"stored in {store('short_calls', {'target': 'tiny', 'draft': 'tiny-draft', 'ratio': found.ratio, **row})}"
        )


if __name__ == "__main__":
    main()
