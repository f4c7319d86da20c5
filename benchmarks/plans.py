"""Seconds of whole plan commands: `python -m benchmarks.plans [--against CHECKOUT]`.

Starts `launch/plan.py` again and again, one command after the other in turns; medians and the fastest. With `--against`
another checkout of the project answers the same commands in the same turns, and the ratio is printed.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measured import ROOT, markdown
from llama_ssp.errors import CapacityError

COMMANDS = (
    "model=30B draft=7B",
    "model=65B draft=7B hardware=g5_12xlarge",
    "model=30B draft=7B search=true",
    "model=llama3_70B draft=llama3_1B hardware=8xh100 hardware.num_nodes=2 search=true",
    "model=65B draft=7B hardware=all search=true",
)


def seconds(checkout: Path, command: str) -> float:
    """One start, to its end."""
    began_s = time.perf_counter()
    line = [sys.executable, "launch/plan.py", *command.split()]
    ended = subprocess.run(line, cwd=checkout, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, CapacityError.exit_code):
        sys.exit(f"{' '.join(line)} in {checkout} ended with code {ended.returncode}: {ended.stderr[-2000:]}")
    return time.perf_counter() - began_s


def measure(
    checkouts: Sequence[Path], commands: Sequence[str], *, num_repetitions: int
) -> dict[str, dict[Path, list[float]]]:
    """Times of every command in every checkout; a start before them warms the file caches."""
    taken: dict[str, dict[Path, list[float]]] = {command: {each: [] for each in checkouts} for command in commands}
    for number in range(1 + num_repetitions):
        for command, of_checkouts in taken.items():
            for checkout in of_checkouts:
                found = seconds(checkout, command)
                if number:
                    of_checkouts[checkout].append(found)
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--against", type=Path, help="a checkout whose plans take part in the turns")
    parser.add_argument("--settings", default="", help="of every command, such as hardware=this_machine")
    arguments = parser.parse_args()
    other = arguments.against
    commands = [f"{command} {arguments.settings}".strip() for command in COMMANDS]
    taken = measure([ROOT, *([other] if other else [])], commands, num_repetitions=arguments.repetitions)
    lines = []
    for command, times in taken.items():
        figures = [min(times[ROOT]), statistics.median(times[ROOT])]
        if other:
            before_s = statistics.median(times[other])
            figures += [before_s, figures[1] / before_s]
        lines.append([command, *(f"{figure:.2f}" for figure in figures)])
    print(markdown(["plan, seconds", "fastest", "median", *(["before", "ratio"] if other else [])], lines))


if __name__ == "__main__":
    main()
