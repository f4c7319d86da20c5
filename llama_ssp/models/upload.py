"""Copies small tables of the host to a device without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[object] | Tensor, device: torch.device) -> Tensor:
    """Return numbers, in nested lists or a tensor on the host, as a tensor on a device.

    A copy from ordinary memory would wait until a GPU has done everything launched before; one from pinned memory is
    queued after it, and torch keeps that memory until it is done.
    """
    if device.type != "cuda":
        return values.to(device) if isinstance(values, Tensor) else torch.tensor(values, device=device)
    pinned = values.pin_memory() if isinstance(values, Tensor) else torch.tensor(values, pin_memory=True)
    return pinned.to(device, non_blocking=True)
