"""Measures the peak memory of this rank and the available memory of its node."""

from pathlib import Path

import torch

_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")


class MemoryWatch:
    """Keeps the largest value seen by `sample`.

    On a CPU that is anonymous resident memory, without pages of mapped files; on a GPU the allocator's reserved peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak_bytes = 0

    def sample(self) -> None:
        """Read the memory in use; call it after each step that may have used more."""
        if self._device.type == "cuda":
            self._peak_bytes = torch.cuda.max_memory_reserved(self._device)
        else:
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes() or 0)

    @property
    def peak_bytes(self) -> int | None:
        """The largest value seen; None if the system does not report it."""
        return self._peak_bytes or None


def anonymous_bytes() -> int | None:
    """This process's anonymous resident memory; None on a system without /proc."""
    return _read(_STATUS, "RssAnon:")


def available_bytes() -> int | None:
    """The node's available memory; None on a system without /proc."""
    return _read(_MEMINFO, "MemAvailable:")


def _read(file: Path, entry: str) -> int | None:
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        if line.startswith(entry):
            return int(line.split()[1]) * 1024
    return None
