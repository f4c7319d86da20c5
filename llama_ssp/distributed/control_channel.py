"""How ranks communicate when collectives no longer work: through the rendezvous store.

A thread on every rank waits for calls. It answers whatever the main thread is doing, until its rank leaves the run: a
rank that does not answer was killed or stopped. Module `faults` decides how a run ends.

    calls RANK        how many a rank was sent
    call RANK N       a request of any rank, or its own to end   -> its thread
    answer RANK N     of that thread, if it received the call,   -> the caller
                      and whether its main thread is at work
    verdict           the error that ends the run: the first one counts
    spoken            how many ranks asked to report the error: the first one does
"""

import math
import os
import signal
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from threading import Thread
from typing import Self, TypeVar

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from llama_ssp.distributed.agree import from_message
from llama_ssp.distributed.environment import LOOPBACK, are_all_here
from llama_ssp.distributed.heartbeat import Heartbeat
from llama_ssp.distributed.signals import Agent
from llama_ssp.errors import InterruptedRun, SspError

_T = TypeVar("_T")
_PATIENCE = timedelta(days=20)  # in milliseconds it has to fit into 32 bits
_LOOK_EVERY_S = 0.02
ANSWER_S = 1.0
"""How long a rank has to answer a call."""
_END_S = 10.0  # how long a rank may take to end after the run has failed
_STOP, _ROLL, _END, _LEAVE = "stop", "roll", "end", "leave"
_BUSY = "busy"
_NUM_CALLS = 2  # a rank may be inside a library that does not let its other threads run


class ControlChannel:
    """The control channel of a world rank; the store is None for a single rank.

    `is_first_here` is true on the lowest rank of a node. `agent` is the torchrun agent that started this rank, if any.

    Attributes:
        is_busy: whether the main thread of this rank is at work, rather than waiting for its GPU.
        peers: the ranks that this rank's GPU may wait for, with itself: all at first, then those of its replica.
    """

    def __init__(
        self, store: Store | None, *, rank: int, size: int, is_first_here: bool, agent: Agent | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._is_first_here = is_first_here
        self._agent = agent
        self.is_busy: Callable[[], bool] = lambda: False
        self.peers: Collection[int] = range(size)
        self._verdict: str | None = None
        self._is_lost = False
        self._num_late = 0
        self._num_stops = 0
        self._stop_received_s = -math.inf
        self._is_alarmed = False
        self._heartbeat: Heartbeat | None = None
        self._store = _connected(store) if store else None
        self._listener: Thread | None = None
        if store:
            self._listener = Thread(target=self._listen, args=(_connected(store),), daemon=True, name="control-channel")
            self._listener.start()

    @classmethod
    def alone(cls) -> Self:
        """Make the channel of a single rank."""
        return cls(None, rank=0, size=1, is_first_here=True)

    def leave(self) -> None:
        """Answer no more; a thread that waited in torch while the interpreter ends would abort the process."""
        if self._listener:
            self._in_time(lambda store: _send(store, self.rank, _LEAVE))
            self._listener.join(ANSWER_S)

    def ask_to_stop(self) -> None:
        """Forward the SIGTERM of this rank to all ranks; may be called from a signal handler."""
        if self._store:
            Thread(target=self._in_time, args=(self._forward_stop,), daemon=True).start()

    def be_alert(self) -> None:
        """Start the heartbeat, which detects a killed rank without a collective; all ranks call this, in any order.

        When a rank is killed, this rank receives a SIGTERM, so that it ends its round, and `has_failed` becomes true.
        """
        if self._store and self._heartbeat is None:
            own = _connected(self._store)
            host = _host(own)
            self._heartbeat = Heartbeat(own, host=host, rank=self.rank, alarm=self._raise_alarm)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the run has failed, by a verdict or a killed rank; does not use the store."""
        return self._is_alarmed or self._verdict is not None

    @property
    def is_orphan(self) -> bool:
        """Whether the torchrun agent that started this rank has ended."""
        return self._agent is not None and self._agent.is_gone

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that do not answer: killed, stopped, or unreachable."""
        if self._store is None or self._verdict:
            return ()
        answers = self._in_time(lambda store: self._call(store, _ROLL))
        if answers:
            return tuple(sorted(set(range(self.size)) - answers.keys()))
        # The store has ended with the process that held it: under srun rank 0, under torchrun an agent. Wait a moment:
        # a killed process closes its connections before its children become orphans.
        deadline = time.monotonic() + ANSWER_S
        while self._agent and not self.is_orphan and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return () if self.is_orphan else (0,)

    def has_busy_rank(self) -> bool:
        """Whether all `peers` answer, and the main thread of one is at work: it compiles, for instance."""
        others = tuple(set(range(self.size)) - set(self.peers))
        for _ in range(_NUM_CALLS):
            answers = self._in_time(lambda store: self._call(store, _ROLL, without=others)) if self._store else None
            if answers is None or len(answers) == len(self.peers):
                return _BUSY in (answers or {}).values()
        return False

    def settle(self, words: str, *, without: tuple[int, ...] = ()) -> str:
        """Propose the error that ends the run, from `agree.to_message`; returns the first proposal of any rank.

        That is the same on every rank that is still alive. `without` are missing ranks, whose answers are not awaited.
        """
        if self._verdict or self._store is None:
            return self._verdict or words
        verdict = self._in_time(lambda store: store.compare_set("llama_ssp/verdict", "", words).decode())
        if verdict == words:
            self._in_time(lambda store: self._call(store, f"{_END}\n{words}", without=without))
        return verdict or words

    @property
    def verdict(self) -> str | None:
        """The error that ends the run, once a rank has proposed one."""
        if self._verdict:
            return self._verdict
        key = "llama_ssp/verdict"
        return self._in_time(lambda store: store.check([key]) and store.get(key).decode()) or self._verdict

    def is_error_reporter(self, *, without: tuple[int, ...] = ()) -> bool:
        """Whether this rank reports the error: rank 0 if it can, else the first that asks; `without` missing ranks."""
        if self._store is None:
            return self.rank == 0
        first = self._in_time(lambda store: self._claim(store, waits=self.rank > 0 and 0 not in without))
        if first is None:  # the store has ended, with rank 0 or with an agent
            return self.rank == 0 or (0 in without and (self._is_first_here or self.rank == 1))
        return first

    def _claim(self, store: Store, *, waits: bool) -> bool:
        deadline = time.monotonic() + ANSWER_S
        while waits and time.monotonic() < deadline and not store.check(["llama_ssp/spoken"]):
            time.sleep(_LOOK_EVERY_S)
        return bool(store.add("llama_ssp/spoken", 1) == 1)

    def _raise_alarm(self) -> None:
        if self.verdict is None:  # a rank that ends with a verdict need not send a farewell
            self._is_alarmed = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _forward_stop(self, store: Store) -> None:
        if time.monotonic() - self._stop_received_s < ANSWER_S:  # the signal came from a call
            return
        if store.add(f"llama_ssp/stops/{self._num_stops}", 1) == 1:
            self._call(store, _STOP)

    def _call(self, store: Store, words: str, *, without: tuple[int, ...] = ()) -> dict[int, str]:
        """Call all ranks, and return the answers that come in time."""
        keys = [f"llama_ssp/answer/{rank}/{_send(store, rank, words)}" for rank in range(self.size)]
        answers: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        awaited = set(range(self.size)) - set(without)
        while awaited and time.monotonic() < deadline:
            for rank in awaited:
                if store.check([keys[rank]]):
                    answers[rank] = store.get(keys[rank]).decode()
            awaited -= answers.keys()
            time.sleep(_LOOK_EVERY_S)
        return answers

    def _in_time(self, ask: Callable[[Store], _T]) -> _T | None:
        """Ask the store; None if it does not answer in time. After two consecutive timeouts it is not asked again."""
        answers: list[_T] = []
        store = self._store
        if self._is_lost or store is None:
            return None

        def keep() -> None:
            try:
                answers.append(ask(store))
            except DistError:
                self._is_lost = True

        thread = Thread(target=keep, daemon=True)
        try:
            thread.start()
            thread.join(2 * ANSWER_S + 1)
        except RuntimeError:  # no memory for a thread, which may be the error to report
            keep()
        if answers:
            self._num_late = 0
            return answers[0]
        self._num_late += 1
        self._is_lost |= self._num_late > 1
        return None

    def _listen(self, store: Store) -> None:
        number, kind = 0, ""
        try:
            while kind != _LEAVE:
                store.wait([call := f"llama_ssp/call/{self.rank}/{number}"], _PATIENCE)
                kind, _, words = store.get(call).decode().partition("\n")
                self._verdict = words or self._verdict
                store.set(f"llama_ssp/answer/{self.rank}/{number}", _BUSY if self.is_busy() else "")
                if kind == _STOP:
                    self._num_stops += 1
                    self._stop_received_s = time.monotonic()
                if kind in (_STOP, _END):
                    os.kill(os.getpid(), signal.SIGTERM)
                if kind == _END:
                    _insist(from_message(words))
                number += 1
        except DistError:  # the rank that held the store has ended; collectives raise an error of their own
            if self._agent and self._agent.holds_store:  # an agent was killed, perhaps on another node
                os.kill(os.getpid(), signal.SIGTERM)


def _send(store: Store, rank: int, words: str) -> int:
    """Call one rank; returns the number of the call among those of that rank."""
    number: int = store.add(f"llama_ssp/calls/{rank}", 1) - 1
    store.set(f"llama_ssp/call/{rank}/{number}", words)
    return number


def _connected(store: Store) -> Store:
    """Open another connection to a store, because calls on one connection block each other."""
    connection: Store = store.clone()  # type: ignore[attr-defined] # torch's types do not know it
    return connection


def _host(store: Store) -> str:
    """The host of the store and of rank 0, as this rank reaches it."""
    if are_all_here(os.environ):
        return LOOPBACK
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host: str = getattr(store, "host", "localhost")
    return host


def _insist(ending: SspError) -> None:
    """End this process if it does not end by itself, because it may wait for ever."""
    if not isinstance(ending, InterruptedRun):
        time.sleep(_END_S)
        os._exit(ending.exit_code)
