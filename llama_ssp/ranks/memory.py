"""Memory: this rank's peak, and sentences for memory and disks that ran out."""

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from llama_ssp.errors import FULL_DISK, CapacityError, SspError
from llama_ssp.ranks.nccl import is_of_nccl

_EVERY_S = 0.005
_STATUS = Path("/proc/self/status")
# The CPU allocator and failed thread starts raise a plain RuntimeError, which only its text identifies.
_MEMORY_WORDS = (
    "can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "can't start new thread",
)  # fmt: skip


class MemoryWatch:
    """Keeps the largest value seen by `sample`.

    On a CPU that is anonymous resident memory, without pages of mapped files. On a GPU it is all that the GPU has lost,
    as plans count it: context, NCCL and graphs, and the allocator's reserved peak; other programs' memory, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak_bytes = 0

    @contextmanager
    def closely(self) -> Iterator[None]:
        """Sample all the time meanwhile; a GPU's allocator remembers its peak itself."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_EVERY_S):
                self.sample()

        watcher = threading.Thread(target=watch, name="memory")
        if self._device.type == "cpu":
            watcher.start()
        try:
            yield
        finally:
            done.set()
            if watcher.ident:
                watcher.join()

    def sample(self) -> None:
        """Read the memory in use; call it after each step that may have used more."""
        if self._device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            used_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
            self._peak_bytes = max(self._peak_bytes, used_bytes + torch.cuda.max_memory_reserved(self._device))
        else:
            self._peak_bytes = max(self._peak_bytes, anonymous_bytes() or 0)

    @property
    def peak_bytes(self) -> int | None:
        """The largest value seen; None if the system does not report it."""
        return self._peak_bytes or None


def anonymous_bytes() -> int | None:
    """This process's anonymous resident memory; None if the system does not report it."""
    lines = (line.split() for line in (_STATUS.read_text().splitlines() if _STATUS.exists() else []))
    return next((int(line[1]) * 1024 for line in lines if line[:1] == ["RssAnon:"]), None)


def exhaustion(error: BaseException) -> SspError | None:
    """Return a CapacityError if memory ran out, an SspError if a disk is full, else None."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    is_memory |= isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) and not is_of_nccl(error):
        is_memory |= any(words in str(error).lower() for words in _MEMORY_WORDS)
    if is_memory:
        return CapacityError(
            "out of memory: end other programs on this machine, or need less by model.quantization=int8_weight_only, "
            "a smaller batch_size or more ranks"
        )
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        file = f" {error.filename}" if error.filename else ""
        reason = (error.strerror or str(error)).lower()
        return SspError(f"cannot write{file}: {reason}; free some space and give the same command again to resume")
    return None
