"""Ranks reach each other through the store: who is gone, what the run ends with, and who tells it."""

import os
import signal
import time
from threading import Event, Thread

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.ranks import failures
from llama_ssp.ranks.failures import ControlChannel
from llama_ssp.ranks.process import Agent
from tests.helpers.disturbed import wait_for

pytestmark = pytest.mark.seconds


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the threads would send to their processes."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: sent.append(number))
    monkeypatch.setattr(failures, "ANSWER_S", 0.3)
    monkeypatch.setattr(failures, "_insist", lambda _ending: None)
    return sent


def watches(*ranks: int, size: int) -> list[ControlChannel]:
    store = HashStore()
    return [ControlChannel(store, rank=rank, size=size, is_first_here=rank == 0) for rank in ranks]


def test_ranks_that_do_not_answer_are_missing(signals: list[int]) -> None:
    assert watches(0, 2, size=4)[1].missing() == (1, 3)
    assert watches(0, 1, 2, size=3)[0].missing() == ()
    assert not signals


@pytest.mark.usefixtures("signals")
def test_a_rank_at_work_says_so_and_one_that_does_not_answer_makes_it_useless_to_wait() -> None:
    own, other = watches(0, 1, size=2)
    assert not own.has_busy_rank()
    other.is_busy = lambda: True
    assert own.has_busy_rank()
    [lonely, *_] = watches(0, 1, size=3)
    lonely.is_busy = lambda: True
    assert not lonely.has_busy_rank()
    assert not ControlChannel.alone().has_busy_rank()


@pytest.mark.usefixtures("signals")
def test_ranks_of_another_replica_are_not_asked_whether_they_are_at_work() -> None:
    """They do not wait for this replica, so what they do says nothing about when its GPUs will finish."""
    own, other, elsewhere = watches(0, 1, 2, size=3)
    elsewhere.is_busy = lambda: True
    assert own.has_busy_rank()
    own.peers = range(2)
    assert not own.has_busy_rank()
    other.is_busy = lambda: True
    assert own.has_busy_rank()
    [own, compiling] = watches(0, 1, size=4)
    own.peers, compiling.is_busy = range(2), lambda: True
    assert own.has_busy_rank()


@pytest.mark.usefixtures("signals")
@pytest.mark.heavy
def test_a_store_that_does_not_answer_is_missed_with_its_rank_and_asked_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [own] = watches(1, size=2)
    over = Event()

    class Silent:
        def add(self, _key: str, _amount: int) -> int:
            over.wait(20)
            raise dist.DistNetworkError("gone")

    monkeypatch.setattr(own, "_store", Silent())
    assert own.missing() == (0,)
    assert own.missing() == (0,)
    started = time.monotonic()
    assert own.agree_on("SspError\nmine", without=(0,)) == "SspError\nmine"
    assert own.is_error_reporter(without=(0,))
    assert time.monotonic() - started < 1.0
    over.set()


class Lost:
    """A store whose process was killed."""

    def __getattr__(self, _name: str) -> object:
        raise dist.DistNetworkError("gone")


@pytest.mark.usefixtures("signals")
def test_a_store_that_went_with_the_agent_leaves_nobody_missing_and_rank_0_speaks() -> None:
    gone = Agent(pid=-1, holds_store=True)
    for rank in (0, 1):
        own = ControlChannel(HashStore(), rank=rank, size=2, is_first_here=rank == 0, agent=gone)
        own._store = Lost()  # type: ignore[assignment]
        assert own.is_orphan
        assert own.missing() == ()
        assert own.is_error_reporter() is (rank == 0)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("parents", "missing"), [([4, 4, 5], ()), ([4], (0,))], ids=["slowly", "elsewhere"])
def test_an_agent_is_given_a_moment_to_leave_its_ranks(
    parents: list[int], missing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ControlChannel(HashStore(), rank=1, size=2, is_first_here=True, agent=Agent(pid=4, holds_store=True))
    own._store = Lost()  # type: ignore[assignment]
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0) if len(parents) > 1 else parents[0])
    assert own.missing() == missing


@pytest.mark.parametrize(
    ("agent", "sent"),
    [(Agent(pid=4, holds_store=True), [signal.SIGTERM]), (Agent(pid=4, holds_store=False), []), (None, [])],
)
def test_a_store_lost_with_an_agent_on_any_node_is_a_wish_to_stop(
    agent: Agent | None, sent: list[int], signals: list[int]
) -> None:
    own = ControlChannel(HashStore(), rank=1, size=2, is_first_here=True, agent=agent)
    own._listen(Lost())  # type: ignore[arg-type]
    assert signals == sent


@pytest.mark.heavy
def test_a_store_that_was_late_once_is_asked_again(signals: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    [own] = watches(0, size=1)
    store, late = own._store, Event()

    class Late:
        def __getattr__(self, name: str) -> object:
            late.wait(20)
            return getattr(store, name)

    for _ in range(2):
        late.clear()
        monkeypatch.setattr(own, "_store", Late())
        assert own.missing() == (0,)
        late.set()
        monkeypatch.setattr(own, "_store", store)
        assert own.missing() == ()
    assert not signals


def test_the_first_proposal_ends_the_run_on_every_rank(signals: list[int]) -> None:
    first, second, third = watches(0, 1, 2, size=3)
    assert first.verdict is None
    assert second.agree_on("SspError\nsecond") == "SspError\nsecond"
    assert first.agree_on("SspError\nfirst") == third.agree_on("SspError\nthird") == "SspError\nsecond"
    assert [own.verdict for own in (first, second, third)] == ["SspError\nsecond"] * 3
    assert first.missing() == ()
    assert signals == [signal.SIGTERM] * 3


@pytest.mark.usefixtures("signals")
def test_one_rank_speaks_rank_0_where_it_can() -> None:
    zero, one, two = watches(0, 1, 2, size=3)
    assert zero.is_error_reporter()
    assert not one.is_error_reporter()
    assert not two.is_error_reporter(without=(0,))
    one, two = watches(1, 2, size=3)
    assert two.is_error_reporter(without=(0,))
    assert not one.is_error_reporter(without=(0,))


@pytest.mark.usefixtures("signals")
def test_another_rank_speaks_when_rank_0_has_not_come_for_a_while() -> None:
    zero, one = watches(0, 1, size=2)
    waiting = Thread(target=lambda: spoke.append(one.is_error_reporter()))
    spoke: list[bool] = []
    waiting.start()
    waiting.join(0.1)
    assert not spoke
    waiting.join()
    assert spoke == [True]
    assert not zero.is_error_reporter()


@pytest.mark.usefixtures("signals")
def test_a_rank_without_memory_for_a_thread_still_tells_why_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = watches(0, 1, size=2)

    def refuse(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        assert one.agree_on("CapacityError\nfull") == "CapacityError\nfull"
    assert zero.verdict == "CapacityError\nfull"


def test_a_wish_to_stop_reaches_every_rank_once(signals: list[int]) -> None:
    one, two, three = watches(0, 1, 2, size=3)
    for own in (three, one, two):
        own.ask_to_stop()
    wait_for(lambda: len(signals) >= 3, at_most_s=5)
    time.sleep(0.1)
    assert signals == [signal.SIGTERM] * 3


def test_an_alert_rank_hears_a_sigterm_when_another_is_killed_unless_the_run_has_ended(signals: list[int]) -> None:
    zero, one = watches(0, 1, size=2)
    for own in (zero, one):
        own.be_alert()
    assert one._heartbeat
    assert not zero.has_failed
    one.agree_on("SspError\nfull disk")
    del signals[:]
    zero._raise_alarm()
    assert not signals, "the other one has said why it ends"
    zero, one = watches(0, 1, size=2)
    zero._raise_alarm()
    assert signals == [signal.SIGTERM]
    assert zero.has_failed
    assert not one.has_failed


def test_a_rank_alone_misses_nobody_and_speaks() -> None:
    own = ControlChannel.alone()
    own.ask_to_stop()
    assert own.missing() == ()
    assert own.verdict is None
    assert own.agree_on("SspError\nmine") == "SspError\nmine"
    assert own.is_error_reporter()
