"""Measures where the time of a round goes: drafting, verification, and the rest.

Drafting is all device work up to the last drafted token. Verification is all device work after it: the target's
forward, the processors, the rule and the commit. The rest is host time: launching, reading results, bookkeeping.

On the CPU an operation is done when it returns, so the host's clock is exact. On a GPU the host runs ahead: events are
recorded between the pieces and read once they have passed, at least one round later.
"""

import time
from abc import ABC, abstractmethod
from collections import deque

import torch


class Clock(ABC):
    """Times the parts of a round.

    Attributes:
        waited_s: of these parts, the time that this rank only waited for the other model (`overlap`).
        draft_cpu_s: time that this thread ran while it drafted; 0 but where drafting overlaps verification.
    """

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self.waited_s = self.draft_cpu_s = 0.0
        self._taken_s = 0.0, 0.0

    @abstractmethod
    def start(self) -> None:
        """Begin a round."""

    @abstractmethod
    def add(self, part: str, *, waits: bool = False) -> None:
        """Add the time since the last call to `part`, and to `waited_s` if this rank only waited."""

    def forget(self) -> float:
        """Drop what has not been taken; returns this rank's own work in it, without the waiting for the other model."""
        before_s = self._taken_s
        worked_s = sum(self.take()) - (self.waited_s - before_s[0])
        self.waited_s, self.draft_cpu_s = self._taken_s = before_s
        return worked_s

    def take(self) -> tuple[float, float]:
        """Return and reset the seconds of drafting and of verification that are known by now."""
        self._taken_s = self.waited_s, self.draft_cpu_s
        draft_s, verify_s = self._seconds["draft"], self._seconds["verify"]
        self._seconds["draft"] = self._seconds["verify"] = 0.0
        return draft_s, verify_s


class HostClock(Clock):
    """The host's clock, for devices that run synchronously."""

    def start(self) -> None:
        """See `Clock`."""
        self._last = time.perf_counter()

    def add(self, part: str, *, waits: bool = False) -> None:
        """See `Clock`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        if waits:
            self.waited_s += now - self._last
        self._last = now


class EventClock(Clock):
    """CUDA events between the pieces of a round; never synchronizes."""

    def __init__(self) -> None:
        super().__init__()
        self._open: deque[tuple[str, bool, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """See `Clock`."""
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record()

    def add(self, part: str, *, waits: bool = False) -> None:
        """See `Clock`."""
        begin = self._last
        self.start()
        self._open.append((part, waits, begin, self._last))

    def take(self) -> tuple[float, float]:
        """See `Clock`."""
        while self._open and self._open[0][-1].query():
            part, waits, begin, end = self._open.popleft()
            took_s = begin.elapsed_time(end) / 1e3
            self._seconds[part] += took_s
            self.waited_s += waits * took_s
        return super().take()


def clock_for(device: torch.device) -> Clock:
    """Return the clock that is exact on `device`."""
    return EventClock() if device.type == "cuda" else HostClock()
