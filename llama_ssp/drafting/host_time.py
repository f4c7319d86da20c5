"""Time that drafting spends on the host, which reports show as `other` and not as drafting."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class HostTimed:
    """Base class of drafters that work on the host between forwards."""

    _host_s = 0.0

    @contextmanager
    def timing_host(self) -> Iterator[None]:
        """Count the time of the block, which waits for no device."""
        started = time.perf_counter()
        yield
        self._host_s += time.perf_counter() - started

    def take_host_s(self, most_s: float) -> float:
        """Return the seconds that were counted, or `most_s` of them; the rest stays, and is returned later.

        A device passes a draft after the host has launched it.
        """
        taken_s = min(self._host_s, most_s)
        self._host_s -= taken_s
        return taken_s
