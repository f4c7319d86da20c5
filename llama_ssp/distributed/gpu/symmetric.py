"""Memory of a group of GPUs that NCCL knows on all of them: a symmetric window.

A message that lies in a window is summed in one step, by a kernel that reads and writes the memory of all GPUs, where a
ring takes two steps per rank. That decides the time of the small messages of a decoding step. NCCL chooses the kernel
of each message, and uses its other ones where GPUs cannot reach each other's memory or NCCL has no windows.

    product of a row-parallel layer -> window -> all-reduce in place -> added to the residual stream

The product is written into the window itself, so nothing is copied. The next product overwrites the sum.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

NUM_BYTES = 4 * 2**20
"""Larger messages are bound by the links' bandwidth, which rings use as well."""
_CANNOT = (AttributeError, TypeError, RuntimeError)  # an older torch or NCCL, or no such memory on this GPU


class SymmetricWindow:
    """The window of a group.

    Args:
        memory: registered bytes, at the same place of the window on every rank.
        pool: what the bytes were allocated from; it must live as long.
    """

    def __init__(self, memory: Tensor, pool: object) -> None:
        self._memory = memory
        self._pool = pool

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, gather_text: Callable[[str], list[str]], device: torch.device
    ) -> Self | None:
        """Register memory together with the other ranks of a group; None on every rank unless it works on all.

        `gather_text` gathers a text from every rank, in order.
        """
        backend, found = group._get_backend(device), None
        with suppress(*_CANNOT):
            pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(pool, device):
                found = cls(torch.empty(NUM_BYTES, dtype=torch.uint8, device=device), pool)
        # Ranks agree before they register together, so that none waits for one that has failed before.
        if not all(gather_text("allocated" if found else "")):
            return None
        is_registered = False
        with suppress(*_CANNOT):
            backend.register_mem_pool(pool, symm=True)  # type: ignore[attr-defined] # that of NCCL
            is_registered = True
        return found if all(gather_text("registered" if is_registered else "")) else None

    def place(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Memory (num_rows, width) of the window, the same for every call; None if it is too large."""
        num_bytes = num_rows * width * dtype.itemsize
        return self._memory[:num_bytes].view(dtype).view(num_rows, width) if num_bytes <= NUM_BYTES else None
