"""Time from the start of a run to its first token, step by step, on the clock of its own process."""

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llama_ssp.reports.records import StartUp

_STATISTICS = Path("/proc/self/stat")


class StartClock:
    """Records when each step of a start was reached; the start began `age_s` ago."""

    def __init__(self, *, age_s: float = 0.0) -> None:
        self._zero_s = time.monotonic() - age_s
        self._times = {"began_unix_s": time.time() - age_s}

    def reach(self, step: str) -> None:
        """Record the time of a step, a field of `StartUp`; only the first call counts."""
        self._times.setdefault(step, time.monotonic() - self._zero_s)

    @property
    def times(self) -> StartUp:
        """The times of all steps so far."""
        return StartUp(**self._times)


def process_age_s() -> float:
    """Seconds since this process began, including its interpreter's start; 0 on a system without /proc."""
    if not _STATISTICS.exists():
        return 0.0
    ticks = int(_STATISTICS.read_text(encoding="utf-8").rpartition(")")[2].split()[19])  # after the name
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def importing_torch() -> Iterator[None]:
    """Switch the garbage collector off while torch is first imported, since collecting makes this a seventh slower.

    Objects of that import are then frozen: later collections skip them.
    """
    is_first = "torch" not in sys.modules and gc.isenabled()
    if is_first:
        gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
            gc.enable()
