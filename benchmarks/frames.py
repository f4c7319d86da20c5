"""Prints the project's frames from the entry of a run to the function that draws a token.

    .venv/bin/python -m benchmarks.frames

A reader who follows a drafted id meets these functions, and no more.
"""

import sys
import tempfile
from types import CodeType, FrameType
from typing import Any

from launch import run
from llama_ssp.config.catalogue import conf_dir

ROOT = str(conf_dir().parent)


def frames_to(code: CodeType, *arguments: str, skip: int = 0) -> list[str]:
    """List the project's frames, outermost first, of a call of a function in a run.

    Args:
        code: of the function.
        arguments: of the run.
        skip: how many calls come before the one that counts.
    """
    found: list[str] = []
    calls = 0

    def watch(frame: FrameType, event: str, _argument: Any) -> None:  # noqa: ANN401 - as sys.setprofile calls it
        nonlocal calls
        if event != "call" or frame.f_code is not code or found:
            return
        calls += 1
        if calls > skip:
            found.extend(reversed([*_project_frames(frame)]))

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["run.py", *arguments, f"run_dir={folder}"]
        sys.setprofile(watch)
        try:
            run.main()
        finally:
            sys.setprofile(None)
    return found


def _project_frames(frame: FrameType | None) -> Any:  # noqa: ANN401
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and ".venv" not in file and "benchmarks" not in file:
            yield f"{file.removeprefix(ROOT + '/')}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
