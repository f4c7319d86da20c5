"""Converts out-of-memory and full-disk errors of libraries into user errors."""

import errno

import torch

from llama_ssp.errors import FULL_DISK, CapacityError, SspError

# The CPU allocator and failed thread starts raise a plain RuntimeError, which only its text identifies.
_MEMORY_WORDS = (
    "can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "can't start new thread",
)  # fmt: skip


def exhaustion(error: BaseException) -> SspError | None:
    """Return a CapacityError if memory ran out, an SspError if a disk is full, else None."""
    if _is_memory(error):
        return CapacityError(
            "out of memory: end other programs on this machine, or need less by model.quantization=int8_weight_only, "
            "a smaller batch_size or more ranks"
        )
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        file = f" {error.filename}" if error.filename else ""
        reason = (error.strerror or str(error)).lower()
        return SspError(f"cannot write{file}: {reason}; free some space and give the same command again to resume")
    return None


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _MEMORY_WORDS)
