"""Collectives through shared memory for ranks on one node: a small message takes microseconds.

Every rank has a counter, which holds the number of its current message, and two slots, which it writes alternately:

    counters    | rank 0 | rank 1 | ...      one cache line each
    even slots  | rank 0 | rank 1 | ...      messages 2, 4, 6, ...
    odd slots   | rank 0 | rank 1 | ...      messages 1, 3, 5, ...

A rank whose counter is n has finished message n - 1. So a writer of n, which overwrites n - 2, first waits until all
counters are n - 1; a reader of n waits until the writer's counter is n, which is set after the slot is written. All
ranks sum the slots in the same order, so sums are bit-identical.

A waiting rank first spins, then yields, then sleeps. A dead peer is detected by the lock that it held, a stopped one by
the timeout. Counters are plain stores, which other cores see in order only on x86. On other machines, and if ranks
share no memory, messages go through the backend.
"""

import fcntl
import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from llama_ssp.ranks.comms import Comm

SLOT_BYTES = 2**20
_FOLDER = Path("/dev/shm")
_LINE_BYTES = 64
_NUM_SPINS = 2000
_POLITE_S, _NAP_S = 5e-4, 5e-5
_LOOK_EVERY_S = 0.1


class SharedMemoryGroup:
    """Memory shared by a group.

    Args:
        file: descriptor of the mapped file, which stays open; OSError if it cannot be mapped.
        crowded: ranks share cores, so do not spin.

    Attributes:
        most_bytes: larger messages go through the backend.
        timeout_s: how long to wait for a peer.
    """

    most_bytes = SLOT_BYTES

    def __init__(self, file: int, *, rank: int, size: int, crowded: bool) -> None:
        memory = mmap.mmap(file, _num_bytes(size))
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._file = file
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._num_spins = 0 if crowded else _NUM_SPINS
        self._counters = memoryview(memory)[: size * _LINE_BYTES].cast("q")
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=size * _LINE_BYTES)
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._views: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._number = 0
        self.timeout_s = 60.0

    @classmethod
    def join(cls, gather_text: Callable[[str], list[str]], *, rank: int, size: int, crowded: bool) -> Self | None:
        """Share memory with the other ranks of a group, which must call this together.

        Returns None on every rank unless all of them can. `gather_text` gathers a text from every rank, in order.
        """
        # The name is chosen before the file is made, so that it is removed whatever interrupts this.
        path = str(_FOLDER / f"llama_ssp_{secrets.token_hex(8)}") if rank == 0 and _may_share() else ""
        file, board, have_joined = None, None, False
        try:
            with suppress(OSError):  # no room
                file = _make(path, size) if path else None
            shown = gather_text(path if file is not None else "")[0]
            with suppress(OSError):  # on another node, or in another container
                if shown:
                    file = os.open(shown, os.O_RDWR) if file is None else file
                    board = cls(file, rank=rank, size=size, crowded=crowded)
            have_joined = all(gather_text("joined" if board else ""))
        finally:
            if path:
                with suppress(OSError):  # not there, or in a folder mounted read-only
                    Path(path).unlink()
            if file is not None and not have_joined:
                os.close(file)
        return board if have_joined else None

    def all_reduce(self, values: Tensor) -> None:
        """Sum contiguous values over the group, in place."""
        first, second, *others = self._post(values, ())
        self._await(self._peers)
        torch.add(first, second, out=values)
        for part in others:
            values.add_(part)

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """See `Comm.all_gather_last`."""
        parts = self._post(values, sizes)
        self._await(self._peers)
        return torch.cat(parts, dim=-1)

    def deliver(self, values: Tensor | None, *, src: int) -> None:
        """Copy contiguous values of rank `src` to ranks that give values; ranks with None only count the message."""
        if self._rank == src and values is not None:
            self._post(values, ())
            return
        self._number += 1
        self._counters[self._rank * _LINE_BYTES // 8] = self._number
        if values is not None:
            self._await([src])
            values.copy_(self._shown(values, ())[src])

    def _post(self, values: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """Write this rank's part of the next message; returns views of all parts."""
        self._await(self._peers)
        self._number += 1
        parts = self._shown(values, sizes)
        parts[self._rank].copy_(values)
        self._counters[self._rank * _LINE_BYTES // 8] = self._number
        return parts

    def _shown(self, values: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """The slots of this message, as tensors like `values`; `sizes`, unless empty, are their last dimensions."""
        parity = self._number % 2
        key = (parity, values.shape, sizes, values.dtype)
        if key not in self._views:
            shapes = [torch.Size((*values.shape[:-1], width)) for width in sizes]
            shapes = shapes or [values.shape] * len(self._slots[parity])
            with torch.inference_mode(mode=False):  # a tensor made in that mode could not be written outside of it
                slots = self._slots[parity].view(values.dtype)
                parts = [slot[: shape.numel()].view(shape) for slot, shape in zip(slots, shapes, strict=True)]
            self._views[key] = parts
        return self._views[key]

    def _await(self, peers: list[int]) -> None:
        """Wait until these ranks have reached this rank's message; DistBackendError if one has died or is too late."""
        for peer in peers:
            if self._counters[peer * _LINE_BYTES // 8] < self._number:
                self._wait_for(peer)

    def _wait_for(self, peer: int) -> None:
        counters, place, number = self._counters, peer * _LINE_BYTES // 8, self._number
        for _ in range(self._num_spins):
            if counters[place] >= number:
                return
        began = time.monotonic()
        look_s = _LOOK_EVERY_S
        while counters[place] < number:
            waited_s = time.monotonic() - began
            if waited_s < _POLITE_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
            if waited_s >= look_s:
                look_s += _LOOK_EVERY_S
                if self._has_ended(peer) and counters[place] < number:
                    raise dist.DistBackendError(f"rank {peer} of the group has ended")
                if waited_s >= self.timeout_s:
                    raise dist.DistBackendError(f"rank {peer} of the group timed out after {self.timeout_s:g} s")

    def _has_ended(self, peer: int) -> bool:
        """Whether a peer's lock, which a living process holds, is free."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, peer)
        return True


def find_board(comm: Comm) -> SharedMemoryGroup | None:
    """The memory that a group's ranks share, if all of them can; they must call this together."""
    return SharedMemoryGroup.join(comm.gather_text, rank=comm.rank, size=comm.size, crowded=comm.crowded)


def _num_bytes(size: int) -> int:
    return size * (_LINE_BYTES + 2 * SLOT_BYTES)


def _may_share() -> bool:
    return platform.machine() == "x86_64" and _FOLDER.is_dir()


def _make(path: str, size: int) -> int:
    """Make a file in memory for a group; returns its descriptor."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(file, 0, _num_bytes(size))
    except OSError:
        os.close(file)
        raise
    return file
