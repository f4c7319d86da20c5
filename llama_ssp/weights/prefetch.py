"""Reads the next tensors in threads, while earlier ones are quantized or copied to the device.

Only a few tensors are read ahead, so that a loader still holds little more than its own slices.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Generic, TypeVar

from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


class ReadAhead(Generic[Key]):
    """Reads tensors ahead, for callers that take them mostly in the expected order.

    Args:
        read: reads a tensor; also called from threads.
        keys: of all tensors, in the expected order.
        num_ahead: how many are read ahead, each by its own thread; 0 reads on demand.
    """

    def __init__(self, read: Callable[[Key], Tensor], keys: Sequence[Key], *, num_ahead: int) -> None:
        self._read = read
        self._next = dict(pairwise(keys))
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(num_ahead, thread_name_prefix="read") if num_ahead else None
        self._wanted = set(keys)
        self._coming: dict[Key, Future[Tensor]] = {}

    def take(self, key: Key) -> Tensor:
        """Return a tensor, or raise what `read` raised in its thread; drop it, and start to read the next ones."""
        self._wanted.discard(key)
        coming = self._coming.pop(key, None)
        self._look_ahead(key)
        tensor = coming.result() if coming else self._read(key)
        if self._pool and not self._wanted:
            self._pool.shutdown()
        return tensor

    def _look_ahead(self, key: Key) -> None:
        following = self._next.get(key)
        while self._pool and following is not None and len(self._coming) < self._num_ahead:
            if following in self._wanted and following not in self._coming:
                self._coming[following] = self._pool.submit(self._read, following)
            following = self._next.get(following)
