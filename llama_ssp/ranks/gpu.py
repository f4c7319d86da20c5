"""GPUs: which one is current, streams for captures, waits that end, and the errors after which a run cannot go on.

torch's own waits have no limit, a kernel that waits for a lost rank never ends, and torch's watchdog does not know the
collectives that a CUDA graph replays. So the host asks whether an event has passed, and gives up when a collective on
CPUs would. `failures.guard` is for waits that a library makes by itself.

    a result that is there      one query
    a result that is not        a few queries, then naps, each followed by a query and a look at the control channel
    the timeout has passed      a host of this replica is at work, compiling or measuring: the timeout begins again
                                all of them wait for their GPUs, or one does not answer: the wait is given up
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch
import torch.distributed as dist

from llama_ssp.ranks.memory import exhaustion

_NO_GPU = -1
"""The index at which `torch.cuda.device` leaves everything as it is, in a build without CUDA too."""
_LOST = frozenset({214, 700, 702, 710, *range(714, 720), 721})
"""CUDA's codes after which every further call fails: such as 214, ECC, and 700, an illegal access."""
_LOST_WORDS = ("illegal memory access", "misaligned address", "illegal instruction", "unspecified launch failure")
"""Triton's words instead of a code."""
_NUM_QUERIES = 32
_NAP_S = 5e-5  # short against a round: the device has the next one already
_GRACE_S = 1.0  # for a wait of this replica, when a rank of another one has ended
MOST_WORK_S = 600.0
"""Time that a host may be at work while other ranks wait for its GPU; compilers take minutes at most."""


def selected(device: torch.device) -> AbstractContextManager[None]:
    """Make a GPU the current one for a block, for kernels, events and captures; do nothing for a CPU.

    Another model may have selected its own GPU since, and a new thread begins with the first.
    """
    return torch.cuda.device(device.index if device.type == "cuda" else _NO_GPU)


@contextmanager
def selection_kept() -> Iterator[None]:
    """Make the GPU that is current before a block the current one after it."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    try:
        yield
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.set_device(before)


def capture_stream() -> torch.cuda.Stream:
    """Return the stream for all captures of the current GPU.

    torch's default, one stream for the process, lies on the GPU of the first capture: later ones on another GPU fail.
    """
    return _stream_of(torch.cuda.current_device())


@cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def ends_run(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, keeps the run from going on: the GPU is lost, or full."""
    return is_lost(error) or any(exhaustion(one) for one in _causes(error))


def is_lost(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised for, says that every further call of the GPU fails."""
    return any(
        getattr(one, "error_code", None) in _LOST or any(words in str(one) for words in _LOST_WORDS)
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class DeviceWait:
    """The waits of this rank, one object for all its groups.

    Args:
        has_failed: whether this rank knows that the run has failed; never waits.
        has_busy_peer: asks the replica whether the host of a rank is at work; false if one does not answer.

    Attributes:
        timeout_s: how long a wait may take if no host is at work.
        is_waiting: whether the main thread waits for the device, and does not work.
        passed_s: when this rank last got past a wait, on the monotonic clock.
    """

    def __init__(
        self,
        has_failed: Callable[[], bool],
        *,
        has_busy_peer: Callable[[], bool] = lambda: False,
        timeout_s: float = 60.0,
    ) -> None:
        self._has_failed = has_failed
        self._has_busy_peer = has_busy_peer
        self.timeout_s = timeout_s
        self.is_waiting = False
        self.passed_s = time.monotonic()

    def until(self, event: torch.cuda.Event) -> None:
        """Wait until the device has passed an event; DistBackendError if a rank has ended, or if it takes too long."""
        if not any(event.query() for _ in range(_NUM_QUERIES)):
            self.is_waiting = True
            try:
                self._nap_until(event)
            finally:
                self.is_waiting = False
        self.passed_s = time.monotonic()

    def _nap_until(self, event: torch.cuda.Event) -> None:
        began = time.monotonic()
        deadline_s = began + self.timeout_s
        failed_s: float | None = None
        while not event.query():
            time.sleep(_NAP_S)
            now = time.monotonic()
            if failed_s is None and self._has_failed():
                failed_s = now
            if failed_s is not None and now - failed_s >= _GRACE_S:
                raise dist.DistBackendError("the device waits for a rank that has ended")
            if now >= deadline_s:
                if now - began >= MOST_WORK_S or not self._has_busy_peer():
                    raise dist.DistBackendError(f"the device timed out after {self.timeout_s:g} s")
                deadline_s = time.monotonic() + self.timeout_s
