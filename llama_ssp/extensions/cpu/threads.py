"""Chooses how many threads compute the rounds of a CPU, by the times of these rounds.

The threads of a round wait for each other. If another program keeps a core busy, one of them loses its core for
milliseconds while the others wait: then fewer threads are faster. Each number of threads is tried for a few rounds, and
the fastest is kept. Its rounds are compared with the fastest rounds of the same work: once they are slow on average,
another number is used. More threads are tried again after a pause, which doubles each time that they do not help.

Texts do not depend on the number: only decoders whose kernels compute the same bits with any number have a choice.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llama_ssp.ranks.cores import LOAD
from llama_ssp.speculate.engine.threads import Threads

_NUM_UNTIMED = 2
"""First rounds of a kind of work that do not count: one calls Python, one is traced."""
_LEAST_ROUNDS, _LEAST_S = 2, 0.015
"""Least rounds and time of a trial. A thread loses its core for some milliseconds at a time."""
_MOST_SLOWNESS = 4.0
"""A trial ends early once its rounds take this many times as long as rounds of the number in use."""
_WEIGHT = 1 / 64
"""Weight of a round in the average, so that one late round alone changes nothing."""
_MARGIN = 0.9
"""Another number is used if its slowness is below this share of that of the number in use."""
_UNDISTURBED = 1.5
"""Slowness up to which fewer threads are not tried again."""
_BETWEEN_LOOKS_S = 0.01
"""Time of rounds between two comparisons of the numbers, since a round may take a third of a millisecond."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 8.0
_HELD_S = 1.0
"""Seconds of use after which the pause of a number is the first one again."""


@dataclass
class _Candidate:
    """A number of threads, the seconds of rounds at which its use began and ended, and the pause before its next trial.

    Its slowness is the average time of a round, as a multiple of the fastest one of the same work; 0 before its trial.
    """

    number: int
    slowness: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    pause_s: float = _FIRST_PAUSE_S


class ThreadChoice(Threads):
    """The number of threads of a decoder's rounds.

    Args:
        numbers: numbers of threads to choose from, the largest first; if empty, torch's own number is used.
        num_free: threads with a core of their own at first; larger numbers are tried after a pause.
    """

    def __init__(self, numbers: Sequence[int] = (), *, num_free: int | None = None) -> None:
        first = max((number for number in numbers if number <= (num_free or number)), default=None)
        self._candidates = [
            _Candidate(number, slowness=math.inf if first and number > first else 0.0) for number in numbers
        ]
        self._works: dict[Hashable, tuple[int, float]] = {}
        self._now_s = 0.0
        self._tried: _Candidate | None = None
        self._trial = 0, 0.0, 0.0
        self._next_look_s = 0.0
        if numbers:
            self._current = self._tried = next(one for one in self._candidates if not one.slowness)

    @classmethod
    def up_to(cls, most: int, *, num_free: int | None = None) -> "ThreadChoice":
        """Choose among all cores, all but one, half of them, and one, depending on what other programs leave free."""
        return cls(sorted({most, most - 1, most // 2, 1} - {0}, reverse=True) if most > 1 else (), num_free=num_free)

    @property
    def number(self) -> int:
        """The number of threads in use, or of the next round."""
        return (self._tried or self._current).number if self._candidates else torch.get_num_threads()

    @property
    def slowness(self) -> dict[int, float]:
        """Average time of a round by number of threads, as a multiple of the fastest round of the same work."""
        return {one.number: one.slowness for one in self._candidates if 0 < one.slowness < math.inf}

    @property
    def is_undecided(self) -> bool:
        """Whether a number has not been tried yet."""
        return not all(one.slowness for one in self._candidates)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute the block with the chosen number of threads, and what follows with as many as before."""
        before = torch.get_num_threads()
        try:
            _use(self.number)
            yield
        finally:
            _use(before)

    def after_round(self, work: Hashable, seconds: float) -> None:
        """Record the time of a round, and compute the next one with the number that is chosen now."""
        if self._candidates:
            before = self.number
            self.record(work, seconds)
            if self.number != before:
                _use(self.number)

    def record(self, work: Hashable, seconds: float) -> None:
        """Record the time of a round; rounds of equal `work` do the same."""
        self._now_s += seconds
        num_rounds, fastest_s = self._works.get(work, (0, seconds))
        fastest_s = min(seconds, fastest_s) if num_rounds > _NUM_UNTIMED else seconds
        self._works[work] = num_rounds + 1, fastest_s
        if num_rounds < _NUM_UNTIMED:
            return
        if self._tried:
            num_tried, took_s, least_s = self._trial
            self._trial = num_tried, took_s, least_s = num_tried + 1, took_s + seconds, least_s + fastest_s
            is_lost = took_s > _MOST_SLOWNESS * (self._current.slowness or math.inf) * least_s
            if is_lost or (num_tried >= _LEAST_ROUNDS and took_s >= _LEAST_S):
                self._tried.slowness, self._tried.ended_s, self._tried = took_s / least_s, self._now_s, None
                self._next_look_s = self._now_s
        elif self._current.slowness:
            self._current.slowness += _WEIGHT * (seconds / fastest_s - self._current.slowness)
        if not self._tried and self._now_s >= self._next_look_s:
            self._tried, self._trial, self._next_look_s = self._choose(), (0, 0.0, 0.0), self._now_s + _BETWEEN_LOOKS_S

    def _choose(self) -> _Candidate | None:
        """Use the fastest number from now on; returns one to try."""
        if self.is_undecided:
            return next(one for one in self._candidates if not one.slowness)
        current, fastest = self._current, min(self._candidates, key=lambda one: one.slowness)
        if fastest.slowness < _MARGIN * current.slowness:
            if self._now_s - current.began_s > _HELD_S:
                current.pause_s = _FIRST_PAUSE_S
            current.ended_s, fastest.began_s, self._current = self._now_s, self._now_s, fastest
            return None
        for one in self._candidates:  # more threads first
            is_wanted = one.number > current.number or current.slowness > _UNDISTURBED
            if one is not current and is_wanted and self._now_s - one.ended_s >= one.pause_s:
                one.pause_s = min(2 * one.pause_s, _LONGEST_PAUSE_S)
                return one
        return None


def find_threads(most: int) -> ThreadChoice:
    """The choice among at most `most` threads, which begins with no more than have a core of their own."""
    return ThreadChoice.up_to(most, num_free=LOAD.num_free(most))


def _use(number: int) -> None:
    if number != torch.get_num_threads():
        torch.set_num_threads(number)
