"""One-shot all-reduce of small messages between the GPUs of one node, if that is faster than NCCL.

Each rank writes its part into symmetric memory and sums the parts of all ranks itself: one kernel without a ring
(torch.ops.symm_mem.one_shot_all_reduce_copy, which a CUDA graph can capture). The interface is alpha in torch and needs
GPUs with peer access. So a group tries it when it is formed, and uses it up to the largest message size for which all
ranks got the same sum as from NCCL in less time.
"""

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = (4096, 16384, 65536, 262144, 1048576)
"""Bytes of the messages that are tried."""
_DTYPES = (torch.float32, torch.bfloat16)
_NUM_CALLS = 30
_ALIGNMENT = 16
_PATIENCE_S = 20.0  # calls take microseconds, except NCCL's first one, which connects the ranks
_LOOK_EVERY_S = 1e-5
_CANNOT = (ImportError, AttributeError, RuntimeError)  # no such interface, or no peer access


class OneShot:
    """Symmetric memory of a group of GPUs.

    Args:
        buffers: one for each dtype that the kernel supports; fp16 is converted to fp32.
        most_bytes: size of the largest message, in its own dtype.
    """

    def __init__(self, buffers: dict[torch.dtype, Tensor], *, group: dist.ProcessGroup, most_bytes: int) -> None:
        self._buffers = buffers
        self._group_name = group.group_name
        self.most_bytes = most_bytes

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, gather_text: Callable[[str], list[str]], device: torch.device
    ) -> Self | None:
        """Share memory with the other ranks of a group, which must call this together.

        Returns None on every rank if it does not work on all of them, or is never faster. `gather_text` gathers a text
        from every rank, in order.
        """
        if len(set(gather_text(socket.gethostname()))) > 1:
            return None
        # Ranks agree before each collective step, so that none waits for a rank that has failed before it.
        buffers, end = None, None
        with suppress(*_CANNOT):
            buffers = _allocate(device)
        if not all(gather_text("has room" if buffers else "")) or buffers is None:
            return None
        with suppress(*_CANNOT):
            _open(buffers, group)
            end = cls(buffers, group=group, most_bytes=SIZES[-1])
        if not all(gather_text("joined" if end else "")) or end is None:
            return None
        seconds = gather_text(json.dumps(_measure(end, group, device)))
        end.most_bytes = largest_gain([json.loads(text) for text in seconds])
        return end if end.most_bytes else None

    def takes(self, values: Tensor) -> bool:
        """Whether a message is sent this way; the same on every rank."""
        start = values.storage_offset() * values.itemsize
        is_aligned = values.nbytes % _ALIGNMENT == start % _ALIGNMENT == 0
        return is_aligned and values.nbytes <= self.most_bytes and values.is_floating_point()

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum contiguous values over the group, bit-identical on all ranks."""
        known = values if values.dtype in self._buffers else values.float()
        buffer = self._buffers[known.dtype]
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            buffer[: known.numel()], known.flatten(), "sum", self._group_name
        )
        return total.view_as(values).to(values.dtype)


def largest_gain(seconds: Sequence[Sequence[tuple[float, float] | None]]) -> int:
    """The largest message size for which one-shot is faster, in bytes; 0 for none.

    `seconds` of every rank are those of one-shot and NCCL for each of `SIZES`; None if the sums differed.
    """
    most_bytes = 0
    for size, of_ranks in zip(SIZES, zip(*seconds, strict=True), strict=True):
        pairs = [pair for pair in of_ranks if pair]
        if len(pairs) < len(of_ranks) or max(one for one, _ in pairs) >= max(nccl for _, nccl in pairs):
            break
        most_bytes = size
    return most_bytes


def _allocate(device: torch.device) -> dict[torch.dtype, Tensor]:
    """Allocate this rank's symmetric memory."""
    from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 - not in every build of torch

    # Twice the largest message, for fp16 converted to fp32.
    return {dtype: symmetric.empty(2 * SIZES[-1] // dtype.itemsize, dtype=dtype, device=device) for dtype in _DTYPES}


def _open(buffers: dict[torch.dtype, Tensor], group: dist.ProcessGroup) -> None:
    """Map the memory of all ranks of a group, which must call this together."""
    from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 - not in every build of torch

    for buffer in buffers.values():
        symmetric.rendezvous(buffer, group)


def _measure(end: OneShot, group: dist.ProcessGroup, device: torch.device) -> list[tuple[float, float] | None]:
    """Time each size with one-shot and NCCL, in fp16, which one-shot must convert; None if the sums are not equal.

    A rank on which one-shot fails returns None for every size, and has made the same NCCL calls as the others.
    """
    messages, sums, through_nccl = [], [], []
    for size in SIZES:
        messages.append(torch.arange(size // 2, device=device).remainder(64).to(torch.float16) + dist.get_rank(group))
        sums.append(messages[-1].clone())
        dist.all_reduce(sums[-1], group=group)
        through_nccl.append(_seconds(partial(dist.all_reduce, torch.zeros_like(sums[-1]), group=group)))
    seconds: list[tuple[float, float] | None] = []
    try:
        for values, expected, nccl in zip(messages, sums, through_nccl, strict=True):
            one_step = _seconds(partial(end.all_reduce, values))
            seconds.append((one_step, nccl) if torch.equal(end.all_reduce(values), expected) else None)
    except _CANNOT:
        return [None] * len(SIZES)
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    """The mean time of a call on the device; RuntimeError if the device has not finished the calls in time."""
    call()
    warm, started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    warm.record()
    _await(warm)
    started.record()
    for _ in range(_NUM_CALLS):
        call()
    ended.record()
    _await(ended)
    milliseconds: float = started.elapsed_time(ended)
    return milliseconds / 1e3 / _NUM_CALLS


def _await(event: torch.cuda.Event) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not event.query():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device has not finished within {_PATIENCE_S:g} s")
        time.sleep(_LOOK_EVERY_S)
