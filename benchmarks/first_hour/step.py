"""The side of a step's process: says figures as lines of JSON, and ends as the runner reads it."""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, NoReturn

import torch
import transformers

from benchmarks.first_hour.runner import SKIPPED


class Where(NamedTuple):
    """The device of this process, and whether shapes are tiny."""

    device: torch.device
    is_small: bool

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"


Check = Callable[[Where], Iterable[str]]
"""Says figures, and gives a sentence for each fault."""


def say(**figures: object) -> None:
    """Write a line of figures in one piece, since others write too."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def skip(reason: str) -> NoReturn:
    """End a step that cannot run."""
    say(skip=reason)
    sys.exit(SKIPPED)


class FellBack(logging.Handler):
    """Turns warnings of this package into faults: whatever goes on in another way warns of it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        say(fault=record.getMessage())


def main(checks: Mapping[str, Check]) -> None:
    """Make the check that the command line names, on the first GPU or else the CPU; `--small` takes tiny shapes."""
    name, *options = sys.argv[1:]
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("llama_ssp").addHandler(FellBack(logging.WARNING))
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)  # as `world.start` does
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    is_wrong = False
    with torch.inference_mode():
        for fault in checks[name](Where(device, "--small" in options)):
            say(fault=fault)
            is_wrong = True
    sys.exit(is_wrong)
