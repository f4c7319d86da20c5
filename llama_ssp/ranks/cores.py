"""The load of this machine's cores, which decides whether this process's threads sleep or spin while they wait.

Spinning threads are faster if nothing disturbs them. If other programs keep a core busy, a thread may lose its core for
milliseconds, and the threads that spin meanwhile keep it from running: then threads that sleep, or a single thread, are
several times faster.
"""

import os
import sys
import time
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

_CORES = Path("/proc/stat")
_LEAST_S = 0.3
"""The least time between two readings: the kernel counts the time of cores in steps of 10 ms."""
_LEAST_LOOK_S = 0.1
"""Least time over which the load is looked at where a run starts."""
_BUSY_CORES = 0.5
"""Cores that other programs use, from which on threads sleep."""
_POLICY = "OMP_WAIT_POLICY"
_PASSIVE = "passive"


def available() -> frozenset[int]:
    """The cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


class CoreTimes(NamedTuple):
    """Seconds so far: of a clock, of this process and its ended children, and of all programs on some cores.

    The last number is None if the system does not count it.
    """

    clock_s: float
    own_s: float
    all_s: float | None

    @classmethod
    def read(cls, cores: Collection[int]) -> "CoreTimes":
        """Read the times of now."""
        own, busy = os.times(), None
        if _CORES.exists():
            lines = [line.split() for line in _CORES.read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
            ticks = [map(int, line[1:8]) for line in lines if line[0][3:].isdecimal() and int(line[0][3:]) in cores]
            busy = sum(user + nice + system + irq + soft for user, nice, system, _, _, irq, soft in ticks)
        all_s = busy / os.sysconf("SC_CLK_TCK") if busy is not None else None
        return cls(time.monotonic(), sum(own[:4]), all_s)


def used_by_others(began: CoreTimes, ended: CoreTimes, *, ranks_s: float, least_s: float = _LEAST_S) -> float | None:
    """The mean number of cores that other programs used; None if unknown or too short. The ranks used `ranks_s`."""
    took_s = ended.clock_s - began.clock_s
    if began.all_s is None or ended.all_s is None or took_s < least_s:
        return None
    return max(0.0, ended.all_s - began.all_s - ranks_s) / took_s


class Load:
    """The cores that other programs use, from one look at them to the next; the first one is now.

    Args:
        cores: available to this process.
    """

    def __init__(self, cores: Collection[int]) -> None:
        self._cores, self._last, self._found = cores, CoreTimes.read(cores), 0.0

    def look(self) -> float:
        """Return the mean number of cores that other programs used since the last look; right after one, its result."""
        now = CoreTimes.read(self._cores)
        if now.clock_s - self._last.clock_s >= _LEAST_LOOK_S:
            found = used_by_others(self._last, now, ranks_s=now.own_s - self._last.own_s, least_s=_LEAST_LOOK_S)
            self._last, self._found = now, found or 0.0
        return self._found

    def num_free(self, num_threads: int) -> int:
        """The number of these threads that have a core of their own: at least one."""
        return max(1, num_threads - max(0, round(self.look() + num_threads - len(self._cores))))


LOAD = Load(available())
"""The load since the start of the program."""


def wait_by_load(load: Load, environ: MutableMapping[str, str]) -> None:
    """Let the threads of torch sleep while they wait, if a core is busy. Call before torch is imported, which reads it.

    A policy that the user has named stays.
    """
    is_open = "torch" not in sys.modules and not {_POLICY, "GOMP_SPINCOUNT"} & set(environ)
    if is_open and load.look() >= _BUSY_CORES:
        environ[_POLICY] = _PASSIVE


def sleeps(environ: Mapping[str, str]) -> bool:
    """Whether threads sleep while they wait."""
    return environ.get(_POLICY, "").lower() == _PASSIVE
