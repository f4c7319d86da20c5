"""How long a run takes until its first token, and what that consists of, on the clock of its own process."""

import os
import time
from dataclasses import fields
from pathlib import Path

from llama_ssp.reports.lines import StartUp

_STATISTICS = Path("/proc/self/stat")
_PLACE_OF_START = 19
"""Of the clock tick at which the process began, among the fields behind its name."""
_STEPS = {field.name for field in fields(StartUp)} - {"began_unix_s"}


class StartClock:
    """Notes when each step of a start was reached.

    Args:
        age_s: how long ago the start began.
    """

    def __init__(self, *, age_s: float = 0.0) -> None:
        self._zero_s = time.monotonic() - age_s
        self._began_unix_s = time.time() - age_s
        self._reached_s: dict[str, float | None] = dict.fromkeys(_STEPS)

    def reach(self, step: str) -> None:
        """Note the time of a step; only its first time counts.

        Args:
            step: a field of `StartUp`.
        """
        if self._reached_s[step] is None:
            self._reached_s[step] = time.monotonic() - self._zero_s

    @property
    def times(self) -> StartUp:
        """All steps so far."""
        return StartUp(began_unix_s=self._began_unix_s, **self._reached_s)


def process_age_s() -> float:
    """Seconds since this process began, its interpreter included, to a clock tick; 0 on a system without /proc."""
    if not _STATISTICS.exists():
        return 0.0
    ticks = int(_STATISTICS.read_text(encoding="utf-8").rpartition(")")[2].split()[_PLACE_OF_START])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
