"""The streams that CUDA graphs are captured on."""

from functools import cache

import torch


def capture_stream() -> torch.cuda.Stream:
    """Return the stream for all captures of the current GPU.

    torch's default, one stream for the process, lies on the GPU of the first capture: later ones on another GPU fail.
    """
    return _stream_of(torch.cuda.current_device())


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
