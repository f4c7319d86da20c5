"""Sends results from the replicas of a run to rank 0, through the rendezvous store.

Replicas are never at the same point of a run: a collective would make each wait for the others, up to its timeout. So
replicas put results into the store, rank 0 fetches them between rounds, and all ranks wait for the end of a stage while
all are alive. The results are opaque texts.
"""

import time
from collections.abc import Callable
from itertools import count

from torch.distributed import DistStoreError, distributed_c10d

from llama_ssp.ranks.comms import Mesh
from llama_ssp.ranks.failures import ControlChannel

_LOOK_EVERY_S = 0.05
_CALL_EVERY_S = 5.0
_DONE, _STOPPED = _ENDS = ("done", "stopped")
_stages = count()


class ResultQueue:
    """One stage of a run in which each replica does a part; all ranks make one, in the same order.

    A rank may leave calls of the control channel unanswered for `patience_s` before it counts as lost.
    """

    def __init__(self, mesh: Mesh, *, watch: ControlChannel, patience_s: float) -> None:
        watch.be_alert()
        self._store = distributed_c10d._get_default_store()  # has no public name
        self._watch, self._patience_s = watch, patience_s
        self._is_first, self._speaks = mesh.world.rank == 0, mesh.replica.rank == 0
        self._replica = mesh.replica
        self._prefix = f"llama_ssp/stage/{next(_stages)}"
        self._own = f"{self._prefix}/{mesh.number}"
        self._num_sent = 0
        self._next = dict.fromkeys(range(1, mesh.world.size // mesh.replica.size), 0)
        self._any_stopped = False
        self._silent_since: dict[int, float] = {}
        self._called_s = time.monotonic()

    def tell(self, text: str) -> None:
        """Send a text to rank 0; does nothing on ranks that do not speak for their replica."""
        if self._speaks:
            self._store.set(f"{self._own}/{self._num_sent}", text)
            self._num_sent += 1

    def claim(self, number: int) -> int:
        """Take `number` places of a list for this replica, whose ranks ask together; returns the first of them."""
        first = self._store.add(f"{self._prefix}/claimed", number) - number if self._speaks else 0
        return int(self._replica.broadcast_text(str(first)))

    def fetch(self) -> list[str]:
        """On rank 0: return the new texts of the other replicas, in order for each replica."""
        texts = []
        for number in list(self._next):
            while number in self._next and self._store.check([key := f"{self._prefix}/{number}/{self._next[number]}"]):
                text = self._store.get(key).decode()
                self._store.delete_key(key)
                self._next[number] += 1
                if text in _ENDS:
                    del self._next[number]
                    self._any_stopped |= text == _STOPPED
                else:
                    texts.append(text)
        return texts

    def end(self, *, stopped: bool, take: Callable[[str], None]) -> bool:
        """Wait until every replica has done its share; DistStoreError if a rank was lost, once its texts are taken.

        `stopped` says that this replica was stopped before its end. On rank 0 `take` is called with each text that
        arrives. Returns whether any replica was stopped; the same on every rank.
        """
        over = f"{self._prefix}/over"
        if self._is_first:
            self._any_stopped |= stopped
            while self._next:
                has_failed = self._watch.has_failed  # before the last fetch, which takes all texts of the lost rank
                for text in self.fetch():
                    take(text)
                if self._next:
                    self._wait(has_failed=has_failed)
            self._store.set(over, _STOPPED if self._any_stopped else _DONE)
        else:
            self.tell(_STOPPED if stopped else _DONE)
        while not self._store.check([over]):
            self._wait(has_failed=self._watch.has_failed)
        outcome: bytes = self._store.get(over)
        return outcome.decode() == _STOPPED

    def _wait(self, *, has_failed: bool) -> None:
        """Wait a moment; every few seconds check that all ranks are alive."""
        if has_failed:
            raise DistStoreError("a rank ended before its replica")
        time.sleep(_LOOK_EVERY_S)
        began_s, call_every_s = time.monotonic(), min(_CALL_EVERY_S, self._patience_s / 4)
        if self._speaks and began_s - self._called_s > call_every_s:
            missing, self._called_s = self._watch.missing(), time.monotonic()
            self._silent_since = {rank: self._silent_since.get(rank, began_s) for rank in missing}
            if any(self._called_s - since >= self._patience_s for since in self._silent_since.values()):
                raise DistStoreError("timed out: a rank does not answer, and its replica has not ended")
