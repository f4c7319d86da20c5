"""Which GPU is the current one of a thread: kernels, events and captures go there, whatever device a tensor is on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_NO_GPU = -1
"""`torch.cuda.device` leaves everything as it is then, in a build without CUDA too."""


def selected(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one for a block; do nothing for a CPU.

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
