"""On the stub device: runs `launch/run.py` with a rank whose host is at work for a while, as if it compiled a kernel.

`python -m tests.stub_gpu.late_peer RANK SECONDS ARGUMENTS...`, under torchrun.
"""

import os
import runpy
import sys
import time
from itertools import count
from pathlib import Path

from llama_ssp.speculate.engine.round import Round

ROOT = Path(__file__).parents[2]
"""Not that of the tests' helpers, which import pytest: the interpreter with a CUDA build need not have it."""

SECOND = 2
"""The prefill before which the rank is late; its peer has launched its own, and waits for it."""


def main() -> None:
    """Be late in one prefill if this is the rank, and run."""
    late_rank, seconds, *arguments = sys.argv[1:]
    prefill, numbers = Round.prefill, count(1)

    def late(*given: object, **named: object) -> object:
        if next(numbers) == SECOND:
            time.sleep(float(seconds))
        return prefill(*given, **named)  # type: ignore[arg-type]

    if os.environ["RANK"] == late_rank:
        Round.prefill = late  # type: ignore[method-assign, assignment]
    program = ROOT / "launch" / "run.py"
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
