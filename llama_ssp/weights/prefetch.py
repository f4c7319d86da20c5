"""Reads in threads what will be wanted next, while what was read before is quantized or on its way to the device.

What is on its way is a handful of tensors, so that a loader still holds little more than its own slices.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Generic, TypeVar

from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


class ReadAhead(Generic[Key]):
    """Hands out tensors, mostly in the order in which they are wanted.

    Args:
        read: reads one; called from threads, too.
        keys: all of them, in the expected order.
        num_ahead: how many are read beside the one that was asked for, each by a thread of its own; 0 reads on demand.
    """

    def __init__(self, read: Callable[[Key], Tensor], keys: Sequence[Key], *, num_ahead: int) -> None:
        self._read = read
        self._next = dict(pairwise(keys))
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(num_ahead, thread_name_prefix="read") if num_ahead else None
        self._wanted = set(keys)
        self._coming: dict[Key, Future[Tensor]] = {}

    def take(self, key: Key) -> Tensor:
        """Get a tensor, which is then forgotten here; the next ones are on their way from now on.

        Raises:
            CheckpointError: from `read`, whichever thread met it.
        """
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
