"""Ends a run when a rank fails: by one error, the same on every rank that is still alive, which one rank reports.

torchrun, as `llama-ssp run` uses it too, notices that a process of its node has ended, and ends the others by SIGTERM.
Its exit code is 1 for every failure; it notices no rank that is stopped, and none that srun has started. The rest is
done here (tests/distributed/test_kill_matrix.py):

    raise_on_all_ranks   one rank's error reaches all ranks at the next meeting point, without a timeout; `from_rank_0`
                         sends what rank 0 alone can know with it
    ControlChannel       names the ranks that do not answer, since the error of a collective says only that a connection
                         was closed or a timeout passed; agrees on the error and on the rank that reports it; forwards
                         the SIGTERM of one rank to all; ends ranks whose main thread waits for ever
    Heartbeat            notices a killed rank of another replica, with which this one shares no collective, and one
                         that a GPU waits for, on all nodes
    guard                ends a rank whose main thread waits inside a library, such as for a GPU that never finishes

The control channel goes through the rendezvous store. A thread on every rank waits for calls. It answers whatever the
main thread is doing, until its rank leaves the run: a rank that does not answer was killed or stopped.

    calls RANK        how many a rank was sent
    call RANK N       a request of any rank, or its own to end   -> its thread
    answer RANK N     of that thread, if it received the call,   -> the caller
                      and whether its main thread is at work
    verdict           the error that ends the run: the first one counts
    spoken            how many ranks asked to report the error: the first one does
"""

import json
import logging
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
from typing import Self, TypeGuard, TypeVar

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from llama_ssp import errors
from llama_ssp.errors import InterruptedRun, LostRankError, SspError
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.gpu import DeviceWait
from llama_ssp.ranks.memory import exhaustion, explained_by_nccl, is_of_nccl
from llama_ssp.ranks.process import Agent, at_exit, ignore_signals, listen, meeting_host
from llama_ssp.types import Parsed

_ERRORS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SspError)
}
_log = logging.getLogger(__name__)


@contextmanager
def raise_on_all_ranks(comm: Comm) -> Iterator[None]:
    """Run a block on every rank of `comm`, then raise the first user error of any rank on all of them.

    The lowest rank that raised one, or ran out of memory or disk, counts; the error names it if other ranks succeeded.
    """
    mine: SspError | None = None
    try:
        yield
    except (SspError, MemoryError, OSError, RuntimeError) as error:
        mine = error if isinstance(error, SspError) else exhaustion(error)
        if mine is None or (mine is error and comm.size == 1):
            raise
    messages = comm.gather_text(to_message(mine) if mine else "")
    failed = [rank for rank, message in enumerate(messages) if message]
    if failed:
        where = "" if len(failed) == comm.size else f" (rank {failed[0]})"
        raise from_message(messages[failed[0]] + where) from mine


def from_rank_0(comm: Comm, make: Callable[[], object]) -> Parsed:
    """Return what `make` returns on rank 0, as JSON holds it, on every rank; an SspError of it is raised on all."""
    text = ""
    with raise_on_all_ranks(comm):
        if comm.rank == 0:
            text = json.dumps(make())
    return json.loads(comm.broadcast_text(text))


def to_message(error: SspError) -> str:
    """An error as a text for another process."""
    return f"{type(error).__name__}\n{error}"


def from_message(text: str, *, speaks: bool | None = None) -> SspError:
    """The error of a text by `to_message`."""
    kind, _, message = text.partition("\n")
    return _ERRORS[kind](message, speaks=speaks)


_KEY = "llama_ssp/heartbeat"
_FAREWELL = b"."
_CONNECT_S = 10.0
_MAX_BYTES = 64


class Heartbeat:
    """Silent connections of all ranks to rank 0, which the system closes when a rank is killed.

    Args:
        store: a connection to the rendezvous store, used only here.
        host: name of rank 0's host, as other ranks reach it.
        alarm: called once, from a thread, when a rank has ended without a farewell.
    """

    def __init__(self, store: Store, *, host: str, rank: int, alarm: Callable[[], None]) -> None:
        self._store, self._host, self._alarm = store, host, alarm
        self._is_over = Event()
        self._open: list[socket.socket] = []
        at_exit(self.part)
        Thread(target=self._watch, args=(rank,), daemon=True, name="heartbeat").start()

    def part(self) -> None:
        """Send a farewell and stop watching: this rank ends without a fault."""
        self._is_over.set()
        for connection in self._open:
            with suppress(OSError):  # the listening socket, and ranks that have left already
                connection.sendall(_FAREWELL)

    def _watch(self, rank: int) -> None:
        try:
            if rank == 0:
                self._serve()
            else:
                self._connect()
        except (OSError, DistError) as error:  # or too many open files: later ranks have no heartbeat
            _log.info("no more heartbeats through rank 0 at %s: %s", self._host, error)

    def _serve(self) -> None:
        password = secrets.token_hex(16)
        server = listen(self._host)
        self._open.append(server)
        self._store.set(_KEY, f"{server.getsockname()[1]} {password}")
        while True:
            connection, _ = server.accept()
            self._open.append(connection)
            Thread(target=self._listen, args=(connection, password.encode()), daemon=True, name="heartbeat").start()

    def _connect(self) -> None:
        port, password = self._store.get(_KEY).decode().split()
        connection = socket.create_connection((self._host, int(port)), timeout=_CONNECT_S)
        connection.settimeout(None)
        self._open.append(connection)
        connection.sendall(password.encode())
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
"""Time that a rank has to answer a call."""
_STOP, _ROLL, _END, _LEAVE = "stop", "roll", "end", "leave"
_BUSY = "busy"
_NUM_CALLS = 2  # a rank may be inside a library that does not let its other threads run
_VERDICT, _SPOKEN = "llama_ssp/verdict", "llama_ssp/spoken"


class ControlChannel:
    """The control channel of a world rank; the store is None for a single rank.

    `is_first_here` is true on the lowest rank of a node. `agent` is the torchrun agent that started this rank, if any.

    Attributes:
        is_busy: whether the main thread of this rank is at work, rather than waiting for its GPU.
        peers: the ranks that this rank's GPU may wait for, with itself: all at first, then its replica's.
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
        """Forward the SIGTERM of this rank to all ranks, once for all; may be called from a signal handler."""

        def forward(store: Store) -> None:
            if store.add("llama_ssp/stops", 1) == 1:
                self._call(store, _STOP)

        if self._store:
            Thread(target=self._in_time, args=(forward,), daemon=True).start()

    def wait_only_for(self, peers: Collection[int]) -> None:
        """Record the ranks that this rank's GPU may wait for from now on."""
        self.peers = peers

    def be_alert(self, *, is_busy: Callable[[], bool] | None = None) -> None:
        """Start the heartbeat, which detects a killed rank without a collective; all ranks call this, in any order.

        When a rank is killed, this rank receives a SIGTERM, so that it ends its round, and `has_failed` becomes true.
        `is_busy` tells other ranks whether this one is at work; None changes nothing.
        """
        self.is_busy = is_busy or self.is_busy
        if self._store and self._heartbeat is None:
            host, own = meeting_host(os.environ), _connected(self._store)
            self._heartbeat = Heartbeat(own, host=host, rank=self.rank, alarm=self._raise_alarm)

    def _raise_alarm(self) -> None:
        if self.verdict is None:  # a rank that ends with a verdict need not send a farewell
            self._is_alarmed = True
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that the run has failed, by a verdict or a killed rank; does not use the store."""
        return self._is_alarmed or self._verdict is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether this rank knows that the run was interrupted; does not use the store."""
        return self._verdict is not None and isinstance(from_message(self._verdict), InterruptedRun)

    @property
    def is_orphan(self) -> bool:
        """Whether the torchrun agent that started this rank has ended."""
        return self._agent is not None and self._agent.is_gone

    def missing(self) -> tuple[int, ...]:
        """Return the other ranks that do not answer: killed, stopped, or unreachable."""
        if self._store is None or self._verdict:
            return ()
        if (answers := self._in_time(lambda store: self._call(store, _ROLL))) is not None:
            # On a busy machine even this rank's own thread may be late.
            return tuple(sorted(set(range(self.size)) - answers.keys() - {self.rank}))
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
            answers = self._in_time(lambda store: self._call(store, _ROLL, without=others)) or {}
            if not answers or len(answers) == len(self.peers):
                return _BUSY in answers.values()
        return False

    def agree_on(self, words: str, *, without: tuple[int, ...] = ()) -> str:
        """Propose the error that ends the run, as a message; returns the first proposal of any rank.

        That is the same on every rank that is still alive. `without` are missing ranks, whose answers are not awaited.
        """
        if self._verdict:
            return self._verdict
        verdict = self._in_time(lambda store: store.compare_set(_VERDICT, "", words).decode())
        if verdict == words:
            self._in_time(lambda store: self._call(store, f"{_END}\n{words}", without=without))
        return verdict or words

    @property
    def verdict(self) -> str | None:
        """The error that ends the run, once a rank has proposed one."""
        if self._verdict:
            return self._verdict
        return self._in_time(lambda store: store.check([_VERDICT]) and store.get(_VERDICT).decode()) or self._verdict

    def is_error_reporter(self, *, without: tuple[int, ...] = ()) -> bool:
        """Whether this rank reports the error: rank 0 if it can, else the first that asks; `without` missing ranks."""
        waits = self.rank > 0 and 0 not in without

        def claim(store: Store) -> bool:
            deadline = time.monotonic() + ANSWER_S
            while waits and time.monotonic() < deadline and not store.check([_SPOKEN]):
                time.sleep(_LOOK_EVERY_S)
            return bool(store.add(_SPOKEN, 1) == 1)

        first = self._in_time(claim)
        if first is None:  # the store has ended, with rank 0 or with an agent
            return self.rank == 0 or (0 in without and (self._is_first_here or self.rank == 1))
        return first

    def _call(self, store: Store, words: str, *, without: tuple[int, ...] = ()) -> dict[int, str]:
        """Call all ranks, and return the answers that come in time."""
        keys = [f"llama_ssp/answer/{rank}/{_send(store, rank, words)}" for rank in range(self.size)]
        answers: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        awaited = set(range(self.size)) - set(without)
        while awaited and time.monotonic() < deadline:
            answers |= {rank: store.get(keys[rank]).decode() for rank in awaited if store.check([keys[rank]])}
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
                if kind in (_STOP, _END):
                    os.kill(os.getpid(), signal.SIGTERM)
                number += 1
        except DistError:  # the rank that held the store has ended; collectives raise an error of their own
            if self._agent and self._agent.holds_store:  # an agent was killed, perhaps on another node
                os.kill(os.getpid(), signal.SIGTERM)


def _send(store: Store, rank: int, words: str) -> int:
    """Call one rank; returns the number of the call among that rank's calls."""
    number: int = store.add(f"llama_ssp/calls/{rank}", 1) - 1
    store.set(f"llama_ssp/call/{rank}/{number}", words)
    return number


def _connected(store: Store) -> Store:
    """Open another connection to a store, because calls on one connection block each other."""
    connection: Store = store.clone()  # type: ignore[attr-defined] # torch's types do not know it
    return connection


_E = TypeVar("_E", bound=BaseException)
_TIMEOUT_WORDS = ("timed out", "timeout")


@dataclass(kw_only=True)
class Phase:
    """The phase of a run, for messages: a verb such as "loading", its timeout's setting, and a remedy for a loss."""

    doing: str
    limit: str
    remedy: str = LostRankError.remedy

    def go_on(self, doing: str, *, limit: str) -> None:
        """Record that the run does something else now."""
        self.doing, self.limit = doing, limit


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
            ending = exhaustion(error) or error
        else:
            if isinstance(error, KeyboardInterrupt) and _is_of_group(error.__context__):
                error = error.__context__  # torchrun sends a signal while the loss that it has seen ends the block
            # Launchers send one as soon as any rank has ended, before this rank has written the status and the message.
            ignore_signals()
            ending = _ending_of(error, watch, phase)
        if ending is error:
            raise
        raise ending from error


def _is_of_group(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether a collective has failed."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _ending_of(error: _E, watch: ControlChannel, phase: Phase) -> SspError | _E:
    """The error that ends the run, agreed on with the other ranks; `error` itself if it is unforeseen."""
    words, missing, is_unforeseen = watch.verdict, tuple[int, ...](), False
    if words is None:
        mine = error if isinstance(error, SspError) else exhaustion(error)
        if mine and mine is not error:  # its text has no rank, which the other ranks do not know
            mine = type(mine)(f"rank {watch.rank} failed while {phase.doing}: {mine}")
        if mine is None:
            missing = watch.missing() if isinstance(error, KeyboardInterrupt | RuntimeError) else ()
            mine = _loss(error, missing, phase, watch)
        if mine is None:
            is_unforeseen = True
            reason = str(error).strip().partition("\n")[0]
            mine = LostRankError(f"rank {watch.rank} failed while {phase.doing}: {type(error).__name__}: {reason}")
        words = watch.agree_on(to_message(mine), without=missing)
        is_unforeseen &= words == to_message(mine)
    speaks = watch.is_error_reporter(without=missing)
    return error if is_unforeseen else from_message(words, speaks=speaks)


def _loss(error: BaseException, missing: tuple[int, ...], phase: Phase, watch: ControlChannel) -> SspError | None:
    """Describe the error of a collective or a signal; None for other errors."""
    reason, is_signal = str(error).lower(), isinstance(error, KeyboardInterrupt)
    is_late = any(words in reason for words in _TIMEOUT_WORDS)
    cause = f"no answer within {phase.limit}" if is_late else "connection closed"
    if missing:
        if is_signal and not watch.has_failed:
            cause = "no answer"
        names = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} are"
        return LostRankError(f"{names} missing while {phase.doing} ({cause}); {phase.remedy}")
    if is_of_nccl(error):
        return LostRankError(f"rank {watch.rank} failed while {phase.doing}: {explained_by_nccl(error)}")
    is_of_group = _is_of_group(error)
    if is_signal or (is_of_group and watch.is_orphan):  # all ranks are orphans, and others noticed it first
        return InterruptedRun("interrupted")
    if is_of_group:
        lost = f"ranks lost each other while {phase.doing} ({cause})"
        return LostRankError(f"{lost}, though all are alive; {phase.remedy}")
    return None


_WATCH_EVERY_S = 0.25
_NOTICE_S = 3.0  # more than the grace of a wait, and the calls of a main thread that has noticed
_FINISH_S = 120.0  # for the report of an interrupted run, which rank 0 writes after the others have ended
_NUM_UNANSWERED = 3  # see _NUM_CALLS


@contextmanager
def guard(
    watch: ControlChannel, waits: DeviceWait | None, phase: Phase, *, report: Callable[[SspError], None]
) -> Iterator[None]:
    """End this process if the main thread does not come back from a library within the block.

    Most waits for a device are in `gpu.DeviceWait`. Others are made by libraries and have no limit: a copy to the host,
    a launch into a full queue, a new communicator. Python is not asked meanwhile, so no signal and no error can end
    them. A thread calls `report`, and ends the process with the status that the main thread would have reported:

        the run has failed, by the control channel      the main thread has a few seconds to end by itself, or
                                                        minutes if the run is interrupted
        no wait has ended within the timeout            all ranks are called, and one leaves several calls unanswered:
        (with `waits`)                                  a rank that compiles for long does answer
    """
    is_over = Event()

    def look() -> None:
        if (error := _first_loss(watch, waits, is_over)) is None:
            return
        ending = _ending_of(error, watch, phase)
        assert isinstance(ending, SspError), "errors of a collective are foreseen"
        if is_over.is_set():  # the main thread has come back meanwhile, and reports the same
            return
        _log.info("the main thread does not come back: %s", ending)
        try:
            report(ending)
        finally:
            os._exit(ending.exit_code)

    if watch.size > 1:
        Thread(target=look, daemon=True, name="watchdog").start()
    try:
        yield
    finally:
        is_over.set()


def _first_loss(watch: ControlChannel, waits: DeviceWait | None, is_over: Event) -> dist.DistBackendError | None:
    """Wait until a rank is lost and the main thread has had time to notice; None if the block ends before."""
    failed_s: float | None = None
    called_s, num_unanswered = 0.0, 0
    while not is_over.wait(_WATCH_EVERY_S):
        now = time.monotonic()
        if watch.has_failed:
            failed_s = failed_s or now
            if now - failed_s >= (_FINISH_S if watch.is_interrupted else _NOTICE_S):
                return dist.DistBackendError("a rank has ended")
        elif waits and (num_unanswered or now - max(called_s, waits.passed_s) >= waits.timeout_s):
            num_unanswered = num_unanswered + 1 if watch.missing() else 0
            called_s = time.monotonic()
            if num_unanswered == _NUM_UNANSWERED:
                return dist.DistBackendError(f"timed out after {waits.timeout_s:g} s")
    return None
