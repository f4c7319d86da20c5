"""Prints what a reader has to follow, and how long each walk may be: `python -m benchmarks.walks`.

plan      files whose functions `llama-ssp plan` calls, imports aside
weight    files from the reading of a tensor to the layer that holds it
K         places where the default of K stands
draw      functions from the entry of a run to the draw of a drafted id
"""

import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from unittest import mock

import torch

from benchmarks.measured import ROOT
from llama_ssp.kernels.linear import NativeLinear
from llama_ssp.models.loading import load_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.run.commands import program, run
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.sampling import processors
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.source import StoredTensor

PLAN = ("model=30B", "draft=7B", "hardware=p4d_24xlarge")
RUN = ("task=generate", "prompt=x", "max_new_tokens=8")
SHIPPED = ROOT / "llama_ssp" / "shipped" / "tiny"
NUM_DRAWS_OF_PROMPTS = 2


def plan_walk() -> list[str]:
    """Files whose functions a plan calls, outside of imports."""
    found = set()

    def note(frame: FrameType) -> None:
        if (file := _file(frame)) and not any(each.f_code.co_name == "<module>" for each in _stack(frame)):
            found.add(file)

    with mock.patch.object(sys, "argv", ["llama-ssp", "plan", *PLAN]):
        _watched(program.main, note)
    return sorted(found)


def weight_walk() -> list[str]:
    """Files of the calls that lead to the first read of a tensor, and of those that lead to the layer that holds it."""
    steps: dict[CodeType, list[str]] = {}

    def note(frame: FrameType) -> None:
        if frame.f_code in {StoredTensor.read.__code__, NativeLinear.__init__.__code__}:
            steps.setdefault(frame.f_code, [file for each in _stack(frame) if (file := _file(each))])

    def load() -> None:
        load_model(inspect(SHIPPED), dtype=torch.float32, device=torch.device("cpu"), comm=Comm.single())

    load()  # so that kernels are chosen
    _watched(load, note)
    return [*dict.fromkeys(file for files in steps.values() for file in files if file.startswith("llama_ssp/"))]


def k_walk() -> list[str]:
    """Places in the package and its options that give K a number."""
    places = {"llama_ssp": r"*.py", "conf": "*.yaml"}
    files = [file for folder, names in places.items() for file in sorted((ROOT / folder).rglob(names))]
    return [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        if file.parent.name != "experiment"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.match(r" *num_draft_tokens: (.* = )?[1-9]", line)
    ]


def draw_walk() -> list[str]:
    """Functions of the package, outermost first, up to the third draw: two draw prompts' own next tokens.

    Executors call what they trace from Python once only, which a warm-up would take. So the calls are watched in its
    place, and only until the one that counts: a watched program takes several times as long.
    """
    calls: list[list[str]] = []

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is processors.draw.__code__:
            calls.append([f"{file}:{each.f_lineno} {each.f_code.co_qualname}" for each in _stack(frame)
                          if (file := _file(each))])  # fmt: skip
        if len(calls) > NUM_DRAWS_OF_PROMPTS:
            sys.setprofile(None)

    cold = mock.patch.object(Decoder, "warm_up", side_effect=lambda *_: sys.setprofile(watch))
    with cold, tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        sys.argv = ["run.py", *RUN, f"run_dir={folder}/run"]
        run.main()
    return calls[NUM_DRAWS_OF_PROMPTS]


def _watched(call: Callable[[], object], note: Callable[[FrameType], None]) -> None:
    """Call a function in silence, and note each call below it."""
    sys.setprofile(lambda frame, event, _: note(frame) if event == "call" else None)
    try:
        with redirect_stdout(StringIO()), suppress(SystemExit):
            call()
    finally:
        sys.setprofile(None)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames up to one, outermost first, from this program's own on."""
    found = []
    while frame and frame.f_code.co_filename != __file__:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _file(frame: FrameType) -> str | None:
    """The file of a frame in the package, relative to the repository."""
    file = Path(frame.f_code.co_filename)
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT / "llama_ssp") else None


WALKS = {"plan": (plan_walk, 25), "weight": (weight_walk, 10), "K": (k_walk, 1), "draw": (draw_walk, 15)}
"""Each walk, and how many steps it may have."""

if __name__ == "__main__":
    for name, (walk, most) in WALKS.items():
        steps = walk()
        print(f"{name}: {len(steps)} of at most {most}", *steps, sep="\n    ")
