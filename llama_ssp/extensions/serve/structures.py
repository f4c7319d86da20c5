"""Threads in which the structures of texts, such as grammars, are prepared: neither rounds nor other requests wait.

The library that reads grammars releases Python's lock meanwhile. Small structures never wait for large ones.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from llama_ssp.extensions.serve.inbox import RequestError
from llama_ssp.settings.schema import SamplingConfig

_T = TypeVar("_T")
_LARGE = 1 << 15
"""Characters of settings from which on a structure is a large one."""


class Structures:
    """Threads of one rank that prepare structures; `most_waiting` bounds their number."""

    def __init__(self, most_waiting: float = math.inf) -> None:
        self._most_waiting = most_waiting
        self._small, self._large = (ThreadPoolExecutor(1, thread_name_prefix="structures") for _ in range(2))
        self._num_waiting = 0

    def submit(self, sampling: SamplingConfig | None, prepare: Callable[[], _T]) -> Future[_T]:
        """Prepare what these settings ask for; raises RequestError if too many wait."""
        if self._num_waiting >= self._most_waiting:
            reason = f"{self._num_waiting} structures of texts are being prepared: ask again"
            raise RequestError(reason, status=429, code="rate_limit_exceeded")
        size = sum(len(str(value)) for value in vars(sampling).values()) if sampling else 0
        done = (self._large if size > _LARGE else self._small).submit(prepare)
        self._num_waiting += 1
        done.add_done_callback(self._leave)
        return done

    def _leave(self, _done: Future[_T]) -> None:
        self._num_waiting -= 1

    def close(self) -> None:
        """Prepare no more structures."""
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
