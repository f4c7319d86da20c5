"""How a run ends when a rank fails: one error, the same on every rank that is still alive, which one rank reports.

torchrun, as `llama-ssp run` uses it too, notices that a process of its node has ended, and ends the others by SIGTERM.
Its exit code is 1 for every failure; it knows neither ranks that are stopped nor ranks that srun has started. The tests
that kill and stop ranks in every phase (tests/distributed/test_kill_matrix.py) need more:

    raise_on_all_ranks   one rank's error reaches all ranks at the next meeting point, without a timeout
    ControlChannel       names the ranks that do not answer, since the error of a collective says only that a connection
                         was closed or a timeout passed; agrees on the error and on the rank that reports it; forwards
                         the SIGTERM of one rank to all; ends ranks whose main thread waits for ever
    Heartbeat            notices a killed rank of another replica, with which this one shares no collective, and one
                         that a GPU waits for, on all nodes

The control channel goes through the rendezvous store. A thread on every rank waits for calls. It answers whatever the
main thread is doing, until its rank leaves the run: a rank that does not answer was killed or stopped.

    calls RANK        how many a rank was sent
    call RANK N       a request of any rank, or its own to end   -> its thread
    answer RANK N     of that thread, if it received the call,   -> the caller
                      and whether its main thread is at work
    verdict           the error that ends the run: the first one counts
    spoken            how many ranks asked to report the error: the first one does
"""

import atexit
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Self, TypeVar

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store

from llama_ssp import errors
from llama_ssp.errors import InterruptedRun, LostRankError, SspError
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.environment import LOOPBACK, are_all_here, listen
from llama_ssp.ranks.memory import exhaustion
from llama_ssp.ranks.signals import Agent, ignore_signals

_ERRORS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SspError)
}


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Run a block on every rank of `comm`, then raise the first user error of any rank on all of them.

    It is that of the lowest rank that raised one, or ran out of memory or disk; it names the rank if others succeeded.
    """
    mine: SspError | None = None
    try:
        yield
    except SspError as error:
        mine = error
    except (MemoryError, OSError, RuntimeError) as error:
        mine = exhaustion(error)
        if mine is None:
            raise
    messages = comm.gather_text(to_message(mine) if mine else "")
    failed = [rank for rank, message in enumerate(messages) if message]
    if failed:
        where = "" if len(failed) == comm.size else f" (rank {failed[0]})"
        raise from_message(messages[failed[0]] + where) from mine


def to_message(error: SspError) -> str:
    """Serialize an error for other ranks."""
    return f"{type(error).__name__}\n{error}"


def from_message(text: str) -> SspError:
    """Deserialize an error; see `to_message`."""
    kind, _, message = text.partition("\n")
    return _ERRORS[kind](message)


_log = logging.getLogger(__name__)
_KEY = "llama_ssp/heartbeat"
_FAREWELL = b"."
_CONNECT_S = 10.0
_MAX_BYTES = 64


class Heartbeat:
    """The connections of this rank; every rank makes one object per run.

    Args:
        store: a connection to the rendezvous store, used only here.
        host: of rank 0, as other ranks reach it.
        alarm: called once, from a thread, when a rank has ended without a farewell.
    """

    def __init__(self, store: Store, *, host: str, rank: int, alarm: Callable[[], None]) -> None:
        self._store = store
        self._host = host
        self._alarm = alarm
        self._is_over = Event()
        self._open: list[socket.socket] = []
        atexit.register(self.part)
        if rank == 0:
            password = secrets.token_hex(16)
            server = listen(host)
            self._open.append(server)
            Thread(target=self._accept, args=(server, password.encode()), daemon=True, name="heartbeat").start()
            store.set(_KEY, f"{server.getsockname()[1]} {password}")
        else:
            Thread(target=self._connect, daemon=True, name="heartbeat").start()

    def part(self) -> None:
        """Send a farewell and stop watching: this rank ends without a fault."""
        self._is_over.set()
        for connection in self._open:
            with suppress(OSError):  # the listening socket, and ranks that have left already
                connection.sendall(_FAREWELL)

    def _accept(self, server: socket.socket, password: bytes) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError as error:  # too many open files: later ranks have no heartbeat
                _log.info("no more heartbeats are accepted: %s", error)
                return
            self._open.append(connection)
            Thread(target=self._listen, args=(connection, password), daemon=True, name="heartbeat").start()

    def _connect(self) -> None:
        try:
            port, password = self._store.get(_KEY).decode().split()
            connection = socket.create_connection((self._host, int(port)), timeout=_CONNECT_S)
            connection.settimeout(None)
            self._open.append(connection)
            connection.sendall(password.encode())
        except (OSError, DistError) as error:
            _log.info("no heartbeat to rank 0 at %s: %s", self._host, error)
            return
        self._listen(connection, b"")

    def _listen(self, connection: socket.socket, password: bytes) -> None:
        """Read until the other end closes; connections without the password are ignored."""
        received = b""
        with connection, suppress(OSError):  # closed with unread data
            while len(received) < _MAX_BYTES and (data := connection.recv(_MAX_BYTES)):
                received += data
        if received == password and not self._is_over.is_set():
            self._is_over.set()
            self._alarm()


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

    def agree_on(self, words: str, *, without: tuple[int, ...] = ()) -> str:
        """Propose the error that ends the run, from `to_message`; returns the first proposal of any rank.

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


_E = TypeVar("_E", bound=BaseException)
_TIMEOUT_WORDS = ("timed out", "timeout")
_REMEDY = "run the same command with the same run_dir to resume"


@dataclass(kw_only=True)
class Phase:
    """The phase of a run, for messages: a verb such as "loading", and the setting of its timeout with the value."""

    doing: str
    limit: str


@contextmanager
def unify_failure(watch: ControlChannel, phase: Phase) -> Iterator[None]:
    """Turn an error of the block into the error that ends the run on every rank; a single rank keeps its own.

    That is the first error of any rank, or the ranks that do not answer; its `speaks` is set if this rank reports it.
    The caller keeps `phase` up to date.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if watch.size == 1:
            found = exhaustion(error)
            if found is None:
                raise
            raise found from error
        # Launchers send one as soon as any rank has ended, before this rank has written the status and the message.
        ignore_signals()
        ending = ending_of(error, watch, phase)
        if ending is error:
            raise
        raise ending from error


def ending_of(error: _E, watch: ControlChannel, phase: Phase) -> SspError | _E:
    """The error that ends the run, agreed on with the other ranks; `error` itself if nobody has foreseen it."""
    words, missing, is_unforeseen = watch.verdict, tuple[int, ...](), False
    if words is None:
        mine = error if isinstance(error, SspError) else exhaustion(error)
        if mine and mine is not error:  # its text has no rank, which the other ranks do not know
            mine = type(mine)(f"rank {watch.rank} failed while {phase.doing}: {mine}")
        if mine is None:
            missing = watch.missing() if isinstance(error, KeyboardInterrupt | RuntimeError) else ()
            mine = _message(error, missing, phase, is_orphan=watch.is_orphan, has_failed=watch.has_failed)
        if mine is None:
            is_unforeseen = True
            reason = str(error).strip().partition("\n")[0]
            mine = LostRankError(f"rank {watch.rank} failed while {phase.doing}: {type(error).__name__}: {reason}")
        words = watch.agree_on(to_message(mine), without=missing)
        is_unforeseen &= words == to_message(mine)
    ending = from_message(words)
    ending.speaks = watch.is_error_reporter(without=missing)
    return error if is_unforeseen else ending


def _message(
    error: BaseException, missing: tuple[int, ...], phase: Phase, *, is_orphan: bool, has_failed: bool
) -> SspError | None:
    """Describe the error of a collective or a signal; None for other errors."""
    reason = str(error).lower()
    is_late = any(words in reason for words in _TIMEOUT_WORDS)
    if missing:
        cause = f"no answer within {phase.limit}" if is_late else "connection closed"
        if isinstance(error, KeyboardInterrupt) and not has_failed:
            cause = "no answer"
        names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
        return LostRankError(f"{names} missing while {phase.doing} ({cause}); {_REMEDY}")
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRun("interrupted")
    if isinstance(error, dist.DistError) or "gloo" in reason:
        if is_orphan:  # all ranks are, and others noticed it first
            return InterruptedRun("interrupted")
        cause = f"no answer within {phase.limit}" if is_late else "connection closed"
        return LostRankError(f"ranks lost each other while {phase.doing} ({cause}), though all are alive; {_REMEDY}")
    return None
