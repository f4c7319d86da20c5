"""Where the time of a round goes: drafting, verification, and everything else.

Drafting is all that happens on the device up to the last drafted token. Verification is all that follows there: the
target's forward, the processors, the rule and the commit. What is left is the host's: launching, reading the result,
and its books.

On the CPU operations are done when they return, so the host's clock tells. On a GPU the host runs ahead; there events
are put between the pieces and read when they have passed, one round late or more.
"""

import time
from collections import deque
from typing import Protocol

import torch


class Clock(Protocol):
    """Takes the time of the parts of a round."""

    def start(self) -> None:
        """Begin a round."""
        ...

    def lap(self, part: str) -> None:
        """Book the time since the last call on `part`."""
        ...

    def take(self) -> tuple[float, float]:
        """Seconds of drafting and of verification that have become known since they were last taken."""
        ...


class HostClock:
    """The host's clock, for devices that finish before they return."""

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self._last = 0.0

    def start(self) -> None:
        """Begin a round."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the time since the last call on `part`."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def take(self) -> tuple[float, float]:
        """Hand over what was booked."""
        return _emptied(self._seconds)


class EventClock:
    """CUDA events between the pieces of a round; none is ever waited for."""

    def __init__(self) -> None:
        self._seconds = {"draft": 0.0, "verify": 0.0}
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """Begin a round."""
        self._last = self._event()

    def lap(self, part: str) -> None:
        """Book the time since the last call on `part`, once it is known."""
        now = self._event()
        self._open.append((part, self._last, now))
        self._last = now

    def take(self) -> tuple[float, float]:
        """Hand over what has become known."""
        while self._open and self._open[0][2].query():
            part, begin, end = self._open.popleft()
            self._seconds[part] += begin.elapsed_time(end) / 1e3
        return _emptied(self._seconds)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _emptied(seconds: dict[str, float]) -> tuple[float, float]:
    draft_s, verify_s = seconds["draft"], seconds["verify"]
    seconds["draft"] = seconds["verify"] = 0.0
    return draft_s, verify_s


def clock_for(device: torch.device) -> Clock:
    """The clock that tells the truth on `device`."""
    return EventClock() if device.type == "cuda" else HostClock()
