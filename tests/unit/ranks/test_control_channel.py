"""Ranks ask each other through the store whether they are at work: tests that kill ranks cannot show it on CPUs."""

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.ranks.failures import ControlChannel

pytestmark = pytest.mark.seconds


def channels(*ranks: int, size: int) -> list[ControlChannel]:
    store = HashStore()
    return [ControlChannel(store, rank=rank, size=size, is_first_here=rank == 0) for rank in ranks]


def test_a_rank_at_work_says_so_and_one_that_does_not_answer_makes_it_useless_to_wait() -> None:
    own, other = channels(0, 1, size=2)
    assert not own.has_busy_rank()
    other.is_busy = lambda: True
    assert own.has_busy_rank()
    [lonely, *_] = channels(0, 1, size=3)
    lonely.is_busy = lambda: True
    assert not lonely.has_busy_rank()
    assert not ControlChannel.alone().has_busy_rank()


def test_ranks_of_another_replica_are_not_asked_whether_they_are_at_work() -> None:
    """They do not wait for this replica, so what they do says nothing about when its GPUs will finish."""
    own, other, elsewhere = channels(0, 1, 2, size=3)
    elsewhere.is_busy = lambda: True
    assert own.has_busy_rank()
    own.peers = range(2)
    assert not own.has_busy_rank()
    other.is_busy = lambda: True
    assert own.has_busy_rank()
