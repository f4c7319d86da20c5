"""Memory and disks that run out, told as a sentence instead of a library's traceback."""

import errno

import torch

from llama_ssp.errors import FULL_DISK, CapacityError, SspError

# The CPU's allocator and threads without room for a stack raise a plain RuntimeError, which only its text tells apart.
_MEMORY_WORDS = (
    "can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "can't start new thread",
)  # fmt: skip


def exhaustion(error: BaseException) -> SspError | None:
    """Put an error into a sentence where it says that memory or disk is used up.

    Args:
        error: any error of Python, torch or the operating system.

    Returns:
        CapacityError for memory, SspError for a disk, else None.
    """
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
