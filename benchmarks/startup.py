"""From the command to the first token, on the shipped pair, and what that consists of: `python benchmarks/startup.py`.

Starts `launch/run.py task=generate` again and again, alone and under torchrun, in turns; the times are those that rank
0 writes into `summary.json`, medians. What is imported, and how long each package takes by itself, is told by python's
own `-X importtime` in one more start, which that slows down.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.timing import store

ROOT = Path(__file__).resolve().parents[1]
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
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def start_s(num_ranks: int) -> dict[str, float]:
    """Start a run of its own; seconds that each part of it took, and of all."""
    with tempfile.TemporaryDirectory() as folder:
        commanded_unix_s = time.time()
        _run(_launcher(num_ranks), folder)
        startup = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))["startup"]
    began_s = startup.pop("began_unix_s") - commanded_unix_s
    ends_s = {"began_s": began_s} | {step: began_s + seconds for step, seconds in startup.items()}
    parts_s, before_s = {}, 0.0
    for part, step in PARTS.items():
        parts_s[part] = ends_s[step] - before_s
        before_s = ends_s[step]
    return parts_s | {"all": before_s}


def imports() -> tuple[dict[str, float], int]:
    """Seconds that each package's own modules take to import on one rank, the slowest first; the number of modules."""
    with tempfile.TemporaryDirectory() as folder:
        told = _run([sys.executable, "-X", "importtime"], folder)
    found = _LINE.findall(told)
    package_us: Counter[str] = Counter()
    for own_us, module in found:
        package_us[module.partition(".")[0]] += int(own_us)
    return {package: own_us / 1e6 for package, own_us in package_us.most_common()}, len(found)


def _launcher(num_ranks: int) -> list[str]:
    if num_ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]


def _run(launcher: Sequence[str], run_dir: str) -> str:
    """Run to the end; returns what it said on standard error."""
    command = [*launcher, "launch/run.py", *SETTINGS, f"run_dir={run_dir}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{' '.join(command)} ended with code {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stderr


def measure(ranks: Sequence[int], *, num_repetitions: int) -> dict[str, object]:
    """Start runs in turns and return the medians; one start before them warms the file caches."""
    start_s(1)
    taken: dict[int, list[dict[str, float]]] = {num_ranks: [] for num_ranks in ranks}
    for _ in range(num_repetitions):
        for num_ranks in ranks:
            taken[num_ranks].append(start_s(num_ranks))
    by_package, num_modules = imports()
    return {
        "target": "tiny",
        "draft": "tiny-draft",
        "num_repetitions": num_repetitions,
        "start_s": {
            str(num_ranks): {part: statistics.median(start[part] for start in starts) for part in (*PARTS, "all")}
            for num_ranks, starts in taken.items()
        },
        "num_modules": num_modules,
        "import_s": dict(list(by_package.items())[:12]),
    }


def show(row: dict[str, object], console: Console) -> None:
    """Print both tables."""
    starts, packages = row["start_s"], row["import_s"]
    assert isinstance(starts, dict)
    assert isinstance(packages, dict)
    table = Table(title="from the command to the first token, seconds", title_justify="left", show_edge=False)
    table.add_column("")
    for num_ranks in starts:
        table.add_column(f"{num_ranks} rank{'s' if num_ranks != '1' else ''}", justify="right")
    for part in (*PARTS, "all"):
        table.add_row(part, *(f"{start[part]:.2f}" for start in starts.values()))
    console.print(table)
    table = Table(title=f"{row['num_modules']} modules", title_justify="left", show_edge=False)
    table.add_column("imports of one rank")
    table.add_column("seconds", justify="right")
    for package, seconds in packages.items():
        table.add_row(package, f"{seconds:.2f}")
    console.print(table)


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--store", action="store_true", help="append the figures to benchmarks/results/startup.jsonl")
    arguments = parser.parse_args()
    console = Console()
    row = measure(arguments.ranks, num_repetitions=arguments.repetitions)
    show(row, console)
    if arguments.store:
        console.print(f"stored in {store('startup', row)}")


if __name__ == "__main__":
    main()
