"""Prints the project's functions from the entry of a run to the draw of a drafted id: what a reader has to follow.

.venv/bin/python -m benchmarks.frames
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from unittest import mock

from llama_ssp.run.commands import run
from llama_ssp.speculate.engine.loop import Decoder
from llama_ssp.speculate.sampling import processors

ROOT = Path(__file__).resolve().parents[1]
RUN = ("task=generate", "prompt=x", "max_new_tokens=8")


def frames_to(code: CodeType, *arguments: str, number: int) -> list[str]:
    """List the project's frames, outermost first, of one call of a function in a run that does not warm up.

    Executors call what they trace from Python once only, which a warm-up would take. So the calls are watched in its
    place, and only until the one that counts: a watched program takes several times as long.

    Args:
        code: of the function.
        arguments: of the run.
        number: which call counts, from 0.
    """
    calls: list[list[str]] = []

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is code:
            calls.append([*_project_frames(frame)][::-1])
        if len(calls) > number:
            sys.setprofile(None)

    cold = mock.patch.object(Decoder, "warm_up", side_effect=lambda *_: sys.setprofile(watch))
    with cold, tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        sys.argv = ["run.py", *arguments, f"run_dir={folder}/run"]
        run.main()
    return calls[number]


def _project_frames(frame: FrameType | None) -> Iterator[str]:
    while frame:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT / "llama_ssp"):
            yield f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back


if __name__ == "__main__":
    found = frames_to(processors.draw.__code__, *RUN, number=2)  # two calls draw prompts' own next tokens
    sys.stdout.write("\n".join([*found, f"{len(found)} frames"]) + "\n")
