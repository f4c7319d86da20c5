"""Kernels of a round, counted without a GPU: `python -m benchmarks.gpu_nodes`; `--write` makes the page of the docs.

It needs an interpreter with a CUDA build of torch, which LLAMA_SSP_CUDA_PYTHON names (tests/stub_gpu/README.md). The
budgets are in `gpu_budgets`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.gpu_budgets import ATTENTION, CONTEXT, DRAWS, LAYERS, NUM_DRAFT_TOKENS, NUM_MULTIPROCESSORS, ROUNDS
from tests.stub_gpu.process import Stub, find_stub

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "gpu_nodes.md"
Counts = Mapping[str, Any]
_MADE = "`python -m benchmarks.gpu_nodes --write` makes this page; `just gpu-stub` holds the engine to the budgets."
_BLOCKS = f"A GPU has {NUM_MULTIPROCESSORS} multiprocessors; attention with fewer thread blocks leaves some idle."
_NODES = """\
A node of a CUDA graph is a kernel, a copy or a collective. At batch 1 each costs a GPU a few microseconds that are not
spent on weights, so their number decides how near a round comes to the memory's speed."""


def count(stub: Stub) -> Counts:
    """Count all cases on the stub device; see `gpu_node_counts.main`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts.json"
        stub.run("-m", "benchmarks.gpu_node_counts", out, timeout_s=600, STUB_GPU_ALONE=1)
        counts: Counts = json.loads(out.read_text())
    return counts


def over_budget(counts: Counts) -> list[str]:
    """The cases that exceed their budgets, with both numbers."""
    nodes = [(case, sum(counts["layers"][case.name].values())) for case in LAYERS]
    nodes += [(case, sum(counts["draws"][case.name].values())) for case in DRAWS]  # type: ignore[misc]
    nodes += [(case, sum(counts["rounds"][case.name].values())) for case in ROUNDS]  # type: ignore[misc]
    found = [f"{case.name}: {number} nodes, at most {case.most}" for case, number in nodes if number > case.most]
    blocks = [(case, int(counts["attention"][case.name])) for case in ATTENTION]
    return found + [f"{c.name}: {number} blocks, at least {c.least}" for c, number in blocks if number < c.least]


def document(counts: Counts) -> str:
    """docs/benchmarks/gpu_nodes.md."""
    layers = [(case.name, case.most, counts["layers"][case.name]) for case in LAYERS]
    draws = [(case.name, case.most, counts["draws"][case.name]) for case in DRAWS]
    rounds = [(case.name, case.most, counts["rounds"][case.name]) for case in ROUNDS]
    parts = [
        "# Kernels of a round on a GPU",
        _MADE,
        _NODES,
        f"No GPU was needed: a stub device wrote down what a CUDA build of torch {counts['torch']} launched in fp16.",
        "## A layer",
        _table("layer", layers),
        "## A draw",
        _table("draw of one token", draws),
        f"## A round, K = {NUM_DRAFT_TOKENS}",
        _table("round", rounds),
        f"## Attention over {CONTEXT} slots",
        _BLOCKS,
        _attention(counts),
    ]
    return "\n\n".join(parts) + "\n"


def _table(what: str, rows: Iterable[tuple[str, int, Mapping[str, int]]]) -> str:
    lines = [f"| {what} | nodes | budget | of which |", "|---|---|---|---|"]
    for name, most, sorts in rows:
        parts = ", ".join(f"{number} {sort}" for sort, number in sorts.items())
        lines.append(f"| {name} | {sum(sorts.values())} | {most} | {parts} |")
    return "\n".join(lines)


def _attention(counts: Counts) -> str:
    lines = ["| attention of a layer | blocks | at least |", "|---|---|---|"]
    lines += [f"| {case.name} | {counts['attention'][case.name]} | {case.least} |" for case in ATTENTION]
    return "\n".join(lines)


def main() -> None:
    """Count, and print or write the page; exits with 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} in docs/benchmarks")
    arguments = parser.parse_args()
    stub = find_stub()
    if isinstance(stub, str):
        parser.error(stub)
    counts = count(stub)
    if arguments.write:
        PAGE.write_text(document(counts), encoding="utf-8")
    else:
        Console().print(document(counts), markup=False, soft_wrap=True)
    found = over_budget(counts)
    for line in found:
        Console(stderr=True).print(line)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
