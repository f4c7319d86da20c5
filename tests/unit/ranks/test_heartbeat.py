"""A rank that is killed is learnt of at once, and one that leaves is left alone."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.ranks import failures
from llama_ssp.ranks.failures import Heartbeat
from tests.helpers.disturbed import wait_for

pytestmark = pytest.mark.seconds


@dataclass
class Ranks:
    """Three ends in one process, and the ranks that were alarmed."""

    ends: list[Heartbeat] = field(default_factory=list)
    alarmed: list[int] = field(default_factory=list)

    def kill(self, rank: int) -> None:
        """Close what a rank has open, as the system does after any end."""
        for connection in self.ends[rank]._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    store, all_ranks = HashStore(), Ranks()
    for rank in range(3):
        alarm = partial(all_ranks.alarmed.append, rank)
        all_ranks.ends.append(Heartbeat(store, host="localhost", rank=rank, alarm=alarm))
    wait_for(lambda: [len(end._open) for end in all_ranks.ends] == [3, 1, 1], at_most_s=20)
    yield all_ranks
    for rank, end in enumerate(all_ranks.ends):
        end.part()
        all_ranks.kill(rank)
    all_ranks.ends[0]._open[0].close()


def test_rank_0_learns_of_a_killed_rank_once_and_the_others_are_left_to_it(ranks: Ranks) -> None:
    ranks.kill(2)
    wait_for(lambda: 0 in ranks.alarmed, at_most_s=20)
    ranks.kill(1)
    time.sleep(0.2)
    assert ranks.alarmed.count(0) == 1


def test_all_ranks_learn_of_a_killed_rank_0(ranks: Ranks) -> None:
    ranks.kill(0)
    wait_for(lambda: {1, 2} <= set(ranks.alarmed), at_most_s=20)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_says_farewell_may_end(ranks: Ranks, leaver: int) -> None:
    ranks.ends[leaver].part()
    ranks.kill(leaver)
    time.sleep(0.2)
    assert ranks.alarmed == []


def test_a_rank_that_is_killed_after_another_has_left_is_learnt_of(ranks: Ranks) -> None:
    ranks.ends[1].part()
    ranks.kill(1)
    ranks.kill(2)
    wait_for(lambda: 0 in ranks.alarmed, at_most_s=20)


def test_strangers_may_come_and_go(ranks: Ranks) -> None:
    port = ranks.ends[0]._open[0].getsockname()[1]
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 500):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(words)
    wait_for(lambda: len(ranks.ends[0]._open) == 6, at_most_s=20)
    time.sleep(0.2)
    assert ranks.alarmed == []


def test_a_rank_that_cannot_reach_rank_0_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_CONNECT_S", 0.5)
    store = HashStore()
    with socket.create_server(("localhost", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("llama_ssp/heartbeat", f"{port} password")
    alarmed: list[bool] = []
    end = Heartbeat(store, host="localhost", rank=1, alarm=lambda: alarmed.append(True))
    time.sleep(0.5)
    assert (end._open, alarmed) == ([], [])
