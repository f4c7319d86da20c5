"""Memory: this rank's peak; and sentences for memory and disks that ran out, and for NCCL, with its own words."""

import errno
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from llama_ssp.errors import FULL_DISK, CapacityError, SspError
from llama_ssp.storage.formats import NO_QUANTIZATION, easiest_format

_EVERY_S = 0.005
_STATUS = Path("/proc/self/status")
# The CPU allocator and failed thread starts raise a plain RuntimeError, which only its text identifies.
_MEMORY_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
    "can't start new thread",
)

_REMEDIES = {
    r"/dev/shm|shared memory": "a container needs more shared memory: docker run --shm-size=8g, or --ipc=host",
    r"out of memory|cuda failure 2\b": "end other programs on the GPU, which nvidia-smi lists",
    r"duplicate gpu": "start one rank for each GPU",
    r"version|mismatch|truncated": "install the same torch and NCCL on every node",
    r"interface|bootstrap|connect|route|socket|network|remote|peer|ibv_": (
        "NCCL_SOCKET_IFNAME=NAME names the interface that all nodes share"
    ),
}
"""Patterns of NCCL's last line, and what usually helps; the first that is found counts."""


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
        """On a CPU, sample continually during the block; a GPU's allocator remembers its peak itself."""
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
        narrow = easiest_format()
        narrower = "" if narrow == NO_QUANTIZATION else f"model.quantization={narrow}, "
        return CapacityError(
            f"out of memory: end other programs on this machine, or need less by {narrower}a smaller batch_size or "
            "more ranks"
        )
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        file = f" {error.filename}" if error.filename else ""
        reason = (error.strerror or str(error)).lower()
        return SspError(f"cannot write{file}: {reason}; free some space and give the same command again to resume")
    return None


def is_of_nccl(error: BaseException) -> bool:
    """Whether NCCL raised an error, at its start or in a collective."""
    return isinstance(error, dist.DistBackendError) and "nccl" in str(error).lower()


def explained_by_nccl(error: BaseException) -> str:
    """Return NCCL's own last line with its usual remedy; torch's first ones say only "unhandled system error"."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()][-1].removeprefix("Last error:").strip()
    remedies = [remedy for words, remedy in _REMEDIES.items() if re.search(words, said.lower())]
    return "; ".join([f"NCCL: {said.rstrip('.')}", *remedies[:1], "NCCL_DEBUG=INFO in the environment shows more"])
