"""Plans with a trace against runs on this machine: six drafts by four K, ms/token of both, and their order.

    .venv/bin/python -m benchmarks.traces          reads texts once, times every run, prints the table
    .venv/bin/python -m benchmarks.traces --again  times every run anew by the trace of an earlier call
    .venv/bin/python -m benchmarks.traces num_prompts=2 max_new_tokens=8  settings of all runs

Runs take turns, and the median of each counts. A forecast names no load of other programs, so on a machine that is not
quiet the ratio of two forecasts is compared with that of the two runs: all are divided by the mean error.
"""

import argparse
import json
import math
import sys
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median

from benchmarks.decoding import default_prompts
from benchmarks.measured import Goal, markdown, table_of_goals
from llama_ssp.run.commands import run

FOLDER = Path("outputs/traces")
DRAFTS = {name: (f"draft={name}",) for name in ("tiny-draft", "tiny-eagle", "ngram", "tiny")}
WAYS = DRAFTS | {f"{name}, block": (*DRAFTS[name], "verification=block") for name in ("tiny-draft", "tiny-eagle")}
LENGTHS, TURNS = (1, 2, 4, 8), 3
COMMON = ("model=tiny", "device=cpu", "quiet=true", f"prompts={FOLDER}/prompts.jsonl", "max_new_tokens=64")
NEAR, SURE = 0.10, 0.05
"""The largest error that is asked for, and the distance of two measured times from which their order is told."""


def done(*words: str, name: str) -> dict[str, dict[str, float]]:
    """Run a task, and return its summary; ends the program if the run fails."""
    if code := run.main([*COMMON, *words, f"run_dir={FOLDER}/{name}"]):
        sys.exit(code)
    found: dict[str, dict[str, float]] = json.loads((FOLDER / name / "summary.json").read_text(encoding="utf-8"))
    return found


def main() -> None:
    """See the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("settings", nargs="*")
    is_again, settings = (vars(parser.parse_args())[name] for name in ("again", "settings"))
    FOLDER.mkdir(parents=True, exist_ok=is_again)
    if not is_again:
        lines = [json.dumps({"prompt": text}) + "\n" for text in default_prompts("latency")]
        (FOLDER / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        drafts = f"task.drafts=[{','.join(DRAFTS)}]"
        done("task=acceptance", drafts, "num_samples=8", "batch_size=8", *settings, name="read")
    first = len([*FOLDER.glob("turn-*")])
    measured: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn, way, number in product(range(first, first + TURNS), WAYS, LENGTHS):
        name = f"turn-{turn}/{way}-{number}".replace(", ", "-")
        words = (*WAYS[way], f"speculation.num_draft_tokens={number}", f"trace={FOLDER}/read")
        summary = done("task=latency", *words, f"seed={turn}", *settings, name=name)
        found = summary["speculative"]["ms_per_token"], summary["forecast"]["speculative_ms_per_token"]
        measured.setdefault((way, number), []).append(found)
    times = {cell: tuple(map(median, zip(*found, strict=True))) for cell, found in measured.items()}
    print(report(times))


def report(times: dict[tuple[str, int], tuple[float, ...]]) -> str:
    """The table, the errors and the order."""
    errors = {cell: math.log(forecast / taken) for cell, (taken, forecast) in times.items()}
    mean = fmean(errors.values())
    apart = {cell: math.exp(error - mean) - 1 for cell, error in errors.items()}
    rows = [
        (way, number, f"{taken:.2f}", f"{forecast:.2f}", f"{apart[way, number]:+.0%}")
        for (way, number), (taken, forecast) in times.items()
    ]
    pairs = [
        (one, other) for one, other in combinations(times, 2) if abs(math.log(times[one][0] / times[other][0])) > SURE
    ]
    wrong = [
        both for both in pairs if (times[both[0]][0] < times[both[1]][0]) != (times[both[0]][1] < times[both[1]][1])
    ]
    goals = [
        Goal("share of pairs in the wrong order", len(wrong) / max(len(pairs), 1), 0.0),
        Goal("largest error of a time, by itself", max(abs(math.exp(error) - 1) for error in errors.values()), NEAR),
        Goal("largest error beside the mean one", max(map(abs, apart.values())), NEAR),
    ]
    heads = ("draft", "K", "ms/token", "forecast", "beside the mean error")
    return f"{markdown(heads, rows)}\n\n{table_of_goals(goals)}"


if __name__ == "__main__":
    main()
