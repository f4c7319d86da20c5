"""Which GPU is the current one, the streams that CUDA graphs are captured on, and the errors that end a run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch

from llama_ssp.ranks.memory import exhaustion

_NO_GPU = -1
"""`torch.cuda.device` leaves everything as it is then, in a build without CUDA too."""
_LOST = frozenset({214, 700, 702, 710, *range(714, 720), 721})
"""CUDA's codes after which every further call fails: such as 214, ECC, and 700, an illegal access."""
_LOST_WORDS = ("illegal memory access", "misaligned address", "illegal instruction", "unspecified launch failure")
"""What Triton says instead of a code."""


def selected(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one for a block, for kernels, events and captures; do nothing for a CPU.

    Another model may have selected its own GPU since, and a new thread begins with the first.
    """
    return torch.cuda.device(device.index if device.type == "cuda" else _NO_GPU)


@contextmanager
def selection_kept() -> Iterator[None]:
    """Make the GPU that is current before a block the current one after it."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.set_device(before)


def capture_stream() -> torch.cuda.Stream:
    """Return the stream for all captures of the current GPU.

    torch's default, one stream for the process, lies on the GPU of the first capture: later ones on another GPU fail.
    """
    return _stream_of(torch.cuda.current_device())


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def ends_run(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, leaves no other way to go on: the GPU is lost, or full."""
    if error is None:
        return False
    is_lost = getattr(error, "error_code", None) in _LOST or any(words in str(error) for words in _LOST_WORDS)
    return is_lost or exhaustion(error) is not None or ends_run(error.__cause__ or error.__context__)
