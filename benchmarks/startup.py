"""Seconds from the command to the first token, on the shipped pair: `python -m benchmarks.startup`.

Starts `llama-ssp run task=generate` again and again, with one rank and with two, in turns; times are those that rank 0
writes into `summary.json`, medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measured import ROOT, markdown

SETTINGS = ("task=generate", "prompt=def factorial(n):", "max_new_tokens=8")
PARTS = {
    "launcher": "began_s",
    "interpreter, settings": "composed_s",
    "torch, transformers": "imported_s",
    "process group": "joined_s",
    "models imported, checkpoints checked, plan": "checked_s",
    "models loaded": "loaded_s",
    "prefill, first token": "first_token_s",
}
"""Each part of a start, and the step of `reports.records.StartUp` that ends it."""


def start_s(num_ranks: int) -> dict[str, float]:
    """Start a run; seconds that each part of it took, and of all."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(launcher if num_ranks > 1 else []), "launch/run.py", *SETTINGS]
        commanded_unix_s = time.time()
        subprocess.run([*command, f"run_dir={folder}"], cwd=ROOT, check=True, capture_output=True)
        startup = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))["startup"]
    began_s = startup.pop("began_unix_s") - commanded_unix_s
    ends_s = {"began_s": began_s} | {step: began_s + seconds for step, seconds in startup.items()}
    parts_s, before_s = {}, 0.0
    for part, step in PARTS.items():
        parts_s[part], before_s = ends_s[step] - before_s, ends_s[step]
    return parts_s | {"all": before_s}


def main() -> None:
    """Measure and print; one start before the others warms the file caches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    start_s(1)
    taken: dict[int, list[dict[str, float]]] = {num_ranks: [] for num_ranks in arguments.ranks}
    for _ in range(arguments.repetitions):
        for num_ranks, starts in taken.items():
            starts.append(start_s(num_ranks))
    lines = [
        [part, *(f"{statistics.median(start[part] for start in starts):.2f}" for starts in taken.values())]
        for part in (*PARTS, "all")
    ]
    print(markdown(["seconds to the first token", *(f"ranks: {num_ranks}" for num_ranks in taken)], lines))


if __name__ == "__main__":
    main()
