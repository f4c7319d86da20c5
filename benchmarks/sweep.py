"""`task=benchmark` over K, prompt length, batch and precision of the shipped pair: `python -m benchmarks.sweep`.

One launch of `launch/run.py` for each list, the other settings being those of BASE, and one for each further precision.
Every line of what the launches leave becomes a cell of one stored row, of which `readme` draws the figure.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import store
from llama_ssp.reports.charts import COLOURS, SOFT, Chart
from llama_ssp.reports.plots import sheet

ROOT = Path(__file__).resolve().parents[1]
CONTEXT, NEW_TOKENS = 2048, 64
BASE = {"num_draft_tokens": [4], "prompt_tokens": [64], "batch_sizes": [1]}
LISTS = {
    "num_draft_tokens": [1, 2, 3, 4, 6, 8],
    "prompt_tokens": [16, 256, 1024, CONTEXT - NEW_TOKENS],
    "batch_sizes": [1, 4, 16, 32],
}
QUICK_LISTS = {"num_draft_tokens": [2], "prompt_tokens": [5, 9], "batch_sizes": [2]}
PRECISIONS = (["model.dtype=bf16", "draft.model.dtype=bf16"], ["model.quantization=int8_weight_only"])
"""Beside fp32. Weights that we quantize have no peer: transformers would hold other ones."""
CANDIDATES = {
    "generate": "transformers, generate",
    "assisted": "transformers, assisted",
    "plain": "ours, plain",
    "speculative": "ours, speculative",
}
CHARTS = {
    "num_draft_tokens": ("By K", "drafted tokens per round", "num_draft_tokens"),
    "prompt_tokens": ("By prompt length", "tokens", "prompt_tokens"),
    "batch_sizes": ("By batch", "rows", "batch_size"),
}
"""Of each list: its chart's title, the name of the x axis, and the key of a cell."""
Cells = list[dict[str, Any]]


def launches(lists: Mapping[str, list[int]]) -> dict[str, list[str]]:
    """The settings of every launch, by the list that it varies or the precision that it has."""

    def words(varied: Mapping[str, list[int]]) -> list[str]:
        values = BASE | dict(varied)
        return [f"task.{name}={json.dumps(value, separators=(',', ':'))}" for name, value in values.items()]

    by_list = {name: words({name: values}) for name, values in lists.items()}
    return by_list | {" ".join(overrides): [*words({}), *overrides] for overrides in PRECISIONS}


def launch(overrides: list[str]) -> Cells:
    """One run of the task, and its lines."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "launch/run.py", "task=benchmark", f"run_dir={run_dir}", *overrides]
        subprocess.run(command, cwd=ROOT, check=True)
        return [json.loads(line) for line in (run_dir / "benchmark.jsonl").read_text().splitlines()]


def draw(row: Mapping[str, Any]) -> str:
    """The figure of a stored row: ms/token over K, over prompt length, over batch, and in each precision."""
    runs = row["runs"]
    charts = [
        _chart(title, label, runs[name], lambda cell, key=key: str(cell[key]))  # type: ignore[misc]
        for name, (title, label, key) in CHARTS.items()
    ]
    others = [cell for name, cells in runs.items() if name not in BASE for cell in cells]
    in_fp32 = [cell for cell in runs["num_draft_tokens"] if cell["num_draft_tokens"] in BASE["num_draft_tokens"]]
    charts.append(_chart("By precision", "of the target", [*in_fp32, *others], _precision))
    return sheet(charts)


def _precision(cell: Mapping[str, Any]) -> str:
    return str(cell["dtype"] if cell["quantization"] == "none" else cell["quantization"])


def _chart(title: str, x_label: str, cells: Cells, name: Callable[[dict[str, Any]], str]) -> Chart:
    """A group of bars for each cell."""
    highest = max(ms for cell in cells for ms in cell["ms_per_token"].values())
    chart = Chart(
        title=f"{title}, ms/token", x_label=x_label, y_label="ms/token", highest_x=len(cells), highest_y=highest,
        x_names={place + 0.5: name(cell) for place, cell in enumerate(cells)},
    )  # fmt: skip
    width = 0.8 / len(CANDIDATES)
    colours = dict(zip(CANDIDATES, (SOFT, COLOURS[1], COLOURS[2], COLOURS[0]), strict=True))
    for place, cell in enumerate(cells):
        for number, (candidate, says) in enumerate(CANDIDATES.items()):
            if ms := cell["ms_per_token"].get(candidate):
                left = place + 0.1 + number * width
                value = f"{says}, {name(cell)}: {ms:.2f} ms"
                chart.bar(left, left + 0.94 * width, ms, colours[candidate], says=value, name=says)
    return chart


def main() -> None:
    """Measure, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few small cells, to see that it runs")
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/sweep.jsonl")
    arguments = parser.parse_args()
    lists, new_tokens = (QUICK_LISTS, 6) if arguments.quick else (LISTS, NEW_TOKENS)
    common = [f"task.repetitions={arguments.repetitions}", f"max_new_tokens={new_tokens}"]
    row = {
        "num_threads": torch.get_num_threads(),
        "repetitions": arguments.repetitions,
        "runs": {name: launch([*common, *overrides]) for name, overrides in launches(lists).items()},
    }
    if arguments.store:
        print(f"stored in {store('sweep', row)}")


if __name__ == "__main__":
    main()
