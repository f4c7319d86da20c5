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

    def take_host_s(self) -> float:
        """Return and reset the seconds that were counted."""
        host_s, self._host_s = self._host_s, 0.0
        return host_s
