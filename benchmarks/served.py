"""The planner against rows of serving engines: prints a page, or writes docs/benchmarks/served.md.

    .venv/bin/python -m benchmarks.served FILE [--write]

FILE is a table of aiconfigurator's public rows (NVIDIA, Apache-2.0), one a row of an engine at a steady concurrency C.
Rows have the sums of their engine, where this engine calls NCCL; prompts of others are read between two tokens, C - 1
of them for each completion, or half of them; matrices in FP8 are multiplied in FP8, with half the bytes at twice the
rate.
"""

import argparse
import csv
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from benchmarks.measured import markdown, page_of, show
from benchmarks.published import job
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig, MeasuredSum
from llama_ssp.planning.forwards import OPERATORS_PER_LAYER
from llama_ssp.planning.timing import decoding_error, timing

MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3_8B",
    "meta-llama/Llama-3.1-8B": "llama3_8B",
    "meta-llama/Llama-3.1-70B": "llama3_70B",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3_70B",
    "Qwen/Qwen3-8B": "qwen3_8B",
    "Qwen/Qwen3-14B": "qwen3_14B",
    "Qwen/Qwen3-32B": "qwen3_32B",
}
SYSTEMS = {"a100_sxm": "a100_80gb", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
SUMS_US = {
    "a100_80gb": {"vllm": (5.2, 6.0, 6.9), "trtllm": (4.9, 6.0, 8.4)},
    "h100": {"vllm": (4.4, 4.9, 5.6), "trtllm": (2.9, 3.4, 3.8), "sglang": (2.8, 3.1, 4.1)},
    "h200": {"vllm": (4.6, 4.9, 5.7), "trtllm": (2.8, 3.3, 3.9), "sglang": (2.6, 3.1, 4.2)},
    "b200": {"vllm": (7.0, 7.4, 8.2), "trtllm": (5.2, 5.4, 6.1), "sglang": (4.3, 5.0, 5.6)},
}
"""Of 16 KiB over 2, 4 and 8 GPUs in graphs, from aiconfigurator's tables."""
WAITS_US = {"h100": 3.5, "h200": 3.5, "b200": 1.75}
"""What a sum takes more inside a step for each doubling of its ranks: fitted, so that medians have no trend by GPUs."""
FP8_KERNELS = 4
"""Kernels of a layer that round the inputs of its products."""
FIRST, LAST = 4, 64
"""Concurrency."""
READ_FIRST = {"sglang": 0.5}
"""Share of the others' prompts that a row waits for before its first token. SGLang reads what waits before it goes on
with a step; requests of one length end and begin together, so the mean row waits for half."""
QUEUED = 4
"""A row whose first token took as many times what all C prompts take had no memory for C requests at a time."""


class Served(NamedTuple):
    """A row: machine, GPUs, weights, engine, concurrency; measured over planned time; whether its range holds it.

    A row waited for a share of the others' prompts before its first token. The requests of a row that is queued waited
    for memory, so that fewer of them were decoded at a time.
    """

    names: tuple[str, int, str, str, int]
    ratio: float
    is_inside: bool
    is_queued: bool
    waited: float
    model: str


def machine_of(name: str, engine: str) -> HardwareConfig:
    """Eight GPUs with the sums of an engine."""
    sums = [
        MeasuredSum(num_ranks=number, num_bytes=2**14, s=1e-6 * (us + WAITS_US.get(name, 0.0) * math.log2(number)))
        for number, us in zip((2, 4, 8), SUMS_US[name][engine], strict=True)
    ]
    machine = hardware.load(f"8x{name}")
    return replace(machine, sums=sums, launch_s=machine.kernel_s)


def why_left_out(row: dict[str, str]) -> str | None:
    """A reason; None for a row that is planned."""
    if row["model"] not in MODELS:
        return f"{row['model']} (no dense model of the catalogue)"
    if row["engine"] not in SUMS_US.get(SYSTEMS.get(row["system"], ""), {}):
        return f"{row['system']} with {row['engine']} (no sums are known)"
    if row["weights"] not in ("", "fp8"):
        return f"{row['weights']} (no plan multiplies in it)"
    return None if FIRST <= int(row["concurrency"]) <= LAST else f"concurrency below {FIRST}"


def served(row: dict[str, str], *, as_run_here: bool = False) -> Served:
    """Plan a row; as run here, FP8 saves bytes alone, as in this engine, which multiplies in 16 bits."""
    name, engine, is_fp8 = SYSTEMS[row["system"]], row["engine"], row["weights"] == "fp8"
    is_short = is_fp8 and not as_run_here
    machine, rows, tokens = machine_of(name, engine), int(row["concurrency"]), int(row["output_tokens"])
    spec = replace(
        job(MODELS[row["model"]], int(row["tp"])),
        batch_size=rows,
        prompt_tokens=int(row["input_tokens"]),
        max_new_tokens=tokens,
    )
    if is_fp8 and as_run_here:
        spec = replace(spec, target=replace(spec.target, quantization="fp8_weight_only"))
    timed, layers = timing(spec, machine), spec.target.shape.num_hidden_layers
    step, halved = timed.target_forward, 0.0
    if is_short:  # keys and values are in FP8 on a B200 alone, as the growth with the rows says
        halved = step.matrices_s + (step.attention_s if name == "b200" else 0.0)
        halved -= 2 * FP8_KERNELS * layers * machine.kernel_s
    # A prompt is read with the rows of a step, whose weights it shares, and launched from Python.
    prompt_s = timing(replace(spec, batch_size=1), machine).prefill_s - step.matrices_s
    launches_s = layers * OPERATORS_PER_LAYER * hardware.load(name).launch_s
    prompt_s = max(prompt_s / (1 + is_short), launches_s)
    others_s = (rows - 1) * (1 - READ_FIRST.get(engine, 0.0)) / tokens * prompt_s
    low, high = decoding_error(spec, machine, timed.plain_s) or (math.inf, 0.0)
    ratio = float(row["tpot_ms"]) / 1e3 / (timed.plain_s - halved / 2 + others_s)
    names = name, int(row["tp"]), row["weights"] or "bf16", engine, rows
    first_s = float(row["ttft_ms"]) / 1e3
    return Served(
        names,
        ratio,
        is_inside=low <= ratio <= high,
        model=MODELS[row["model"]],
        is_queued=first_s > QUEUED * rows * prompt_s,
        waited=(first_s / prompt_s - 1) / (rows - 1),
    )


def tenths(rows: Iterable[Served]) -> tuple[float, float]:
    """The 10th and the 90th percentile of measured over planned time."""
    ratios = [row.ratio for row in rows]
    found = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
    return found[0], found[-1]


def table(rows: Sequence[Served], *fields: int, is_held: bool = False) -> str:
    """Groups by these fields; held, also how many are in the 80 % of the rows of all other groups."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row.names[field] for field in fields)].append(row)
    lines = []
    for names, found in sorted(groups.items()):
        inside = [sum(row.is_inside for row in found)]
        if is_held:
            low, high = tenths([row for row in rows if row not in found])
            inside.append(sum(low <= row.ratio <= high for row in found))
        middle = statistics.median(row.ratio for row in found)
        lines.append(
            (
                *names,
                len(found),
                *(f"{number:.2f}" for number in (middle, *tenths(found))),
                *(f"{number}, {100 * number / len(found):.0f} %" for number in inside),
            )
        )
    heads = [("machine", "GPUs", "weights", "engine", "rows at a time")[field] for field in fields]
    held = ["inside 80 % of the others"] * is_held
    return markdown([*heads, "rows", "median", "10th", "90th percentile", "inside their range", *held], lines)


def page(file: Path) -> str:
    """The whole document."""
    with file.open(newline="", encoding="utf-8") as stream:
        listed = [*csv.DictReader(stream)]
    reasons = Counter(filter(None, map(why_left_out, listed)))
    planned = [served(row) for row in listed if why_left_out(row) is None]
    rows = [row for row in planned if not row.is_queued]
    reasons["rows whose requests waited for memory"] = len(planned) - len(rows)
    large = [row for row in rows if row.model == "llama3_70B"]
    left_out = fill("Left out: " + "; ".join(f"{number} of {reason}" for reason, number in reasons.most_common()), 120)
    inside = sum(row.is_inside for row in rows) / len(rows)
    waited = defaultdict(list)
    for row in rows:
        if row.names[-1] == LAST:
            waited[row.names[3]].append(row.waited)
    shares = ", ".join(f"{statistics.median(found):.2f} with {engine}" for engine, found in sorted(waited.items()))
    fp8 = [row for row in listed if why_left_out(row) is None and row["weights"] == "fp8"]
    here = statistics.median(served(row, as_run_here=True).ratio for row in fp8)
    return page_of(
        "served",
        number=len(rows),
        of=len(listed),
        left_out=left_out,
        inside=f"{100 * inside:.0f}",
        waited=shares,
        here=f"{here:.2f}",
        median=f"{100 * (math.exp(statistics.median(abs(math.log(row.ratio)) for row in rows)) - 1):.0f} %",
        held=table(rows, 0, 2, 3, is_held=True),
        groups=table(rows, 0, 1),
        large=table(large, 0, 1, 2),
        engines=table(rows, 0, 1, 2, 3),
        cells=table(rows, 0, 1, 2, 3, 4),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    show(page(given.file), page="served.md", is_written=given.write)
