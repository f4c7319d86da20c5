"""Measures where the time of a round goes: drafting, verification, and the rest.

Drafting is all device work up to the last drafted token. Verification is all device work after it: the target's
forward, the processors, the rule and the commit. The rest is host time: launching, reading results, bookkeeping.

On the CPU an operation is done when it returns, so the host's clock is exact. On a GPU the host runs ahead: events are
recorded between the pieces and read once they have passed, at least one round later.
"""

import time
from collections import deque
from typing import Protocol

import torch


class Clock(Protocol):
    """Times the parts of a round."""

    def start(self) -> None:
        """Begin a round."""

    def lap(self, part: str) -> None:
        """Add the time since the last call to `part`."""

    def take(self) -> tuple[float, float]:
        """Return and reset the seconds of drafting and of verification that are known by now."""


class HostClock:
    """The host's clock, for devices that run synchronously."""

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self._last = 0.0

    def start(self) -> None:
        """See `Clock`."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """See `Clock`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def take(self) -> tuple[float, float]:
        """See `Clock`."""
        return _taken(self._seconds)


class EventClock:
    """CUDA events between the pieces of a round; never synchronizes."""

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """See `Clock`."""
        self._last = self._event()

    def lap(self, part: str) -> None:
        """See `Clock`."""
        now = self._event()
        self._open.append((part, self._last, now))
        self._last = now

    def take(self) -> tuple[float, float]:
        """See `Clock`."""
        while self._open and self._open[0][2].query():
            part, begin, end = self._open.popleft()
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        return _taken(self._seconds)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _taken(seconds: dict[str, float]) -> tuple[float, float]:
    draft_s, verify_s = seconds["draft"], seconds["verify"]
    seconds["draft"] = seconds["verify"] = 0.0
    return draft_s, verify_s


def clock_for(device: torch.device) -> Clock:
    """Return the clock that is exact on `device`."""
    return EventClock() if device.type == "cuda" else HostClock()
