"""Measures where the time of a round goes: drafting, verification, and the rest.

Drafting is all device work up to the last drafted token. Verification is all device work after it: the target's
forward, the processors, the rule and the commit. The rest is host time: launching, reading results, bookkeeping.

On the CPU an operation is done when it returns, so the host's clock is exact. On a GPU the host runs ahead: events are
recorded between the pieces and read once they have passed, at least one round later.
"""

import time
from collections import deque

import torch


class HostClock:
    """Times the parts of a round by the host's clock, for devices that run synchronously.

    Attributes:
        waited_s: of these parts, the time that this rank only waited for the other model (`overlap`).
        draft_cpu_s: time that this thread ran while it drafted; 0 but where drafting overlaps verification.
    """

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self.waited_s = self.draft_cpu_s = 0.0

    def start(self) -> None:
        """Begin a round."""
        self._last = time.perf_counter()

    def add(self, part: str, *, waits: bool = False) -> None:
        """Add the time since the last call to `part`, and to `waited_s` if this rank only waited."""
        before, self._last = self._last, time.perf_counter()
        self._add(part, self._last - before, waits=waits)

    def add_cpu(self, seconds: float) -> None:
        """Add the time that this thread ran while it drafted."""
        self.draft_cpu_s += seconds

    def _add(self, part: str, seconds: float, *, waits: bool) -> None:
        self._seconds[part] += seconds
        self.waited_s += waits * seconds

    def take(self) -> tuple[float, float]:
        """Return and reset the seconds of drafting and of verification that are known by now."""
        seconds, self._seconds = self._seconds, {"draft": 0.0, "verify": 0.0}
        return seconds["draft"], seconds["verify"]


class EventClock(HostClock):
    """CUDA events between the pieces of a round; never synchronizes."""

    def __init__(self) -> None:
        super().__init__()
        self._open: deque[tuple[str, bool, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """See `HostClock`."""
        self._passed = torch.cuda.Event(enable_timing=True)
        self._passed.record()

    def add(self, part: str, *, waits: bool = False) -> None:
        """See `HostClock`."""
        begin = self._passed
        self.start()
        self._open.append((part, waits, begin, self._passed))

    def take(self) -> tuple[float, float]:
        """See `HostClock`."""
        while self._open and self._open[0][-1].query():
            part, waits, begin, end = self._open.popleft()
            self._add(part, begin.elapsed_time(end) / 1e3, waits=waits)
        return super().take()
