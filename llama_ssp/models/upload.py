"""Copies small tables between the host and a device without waiting for it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm


def to_device(values: Sequence[object] | Tensor, device: torch.device) -> Tensor:
    """Return numbers, in nested lists or a tensor on the host, as a tensor on a device.

    A copy from ordinary memory would wait until a GPU has done everything launched before; one from pinned memory is
    queued after it, and torch keeps that memory until it is done.
    """
    if device.type != "cuda":
        return values.to(device) if isinstance(values, Tensor) else torch.tensor(values, device=device)
    pinned = values.pin_memory() if isinstance(values, Tensor) else torch.tensor(values, pin_memory=True)
    return pinned.to(device, non_blocking=True)


class Arriving(NamedTuple):
    """A tensor that is being copied to the host; `passed` is an event after the copy, None on a CPU."""

    values: Tensor
    passed: torch.cuda.Event | None = None

    @classmethod
    def of(cls, values: Tensor) -> "Arriving":
        """Begin to copy a tensor."""
        if not values.is_cuda:
            return cls(values)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        passed = torch.cuda.Event()
        values = host.copy_(values, non_blocking=True)
        passed.record()
        return cls(values, passed)

    def read(self, comm: Comm) -> Tensor:
        """Wait for the tensor."""
        if self.passed:
            comm.wait(self.passed)
        return self.values
