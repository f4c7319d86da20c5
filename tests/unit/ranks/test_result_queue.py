"""What copies finish reaches rank 0, and all of them end a stage together."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.ranks import result_queue
from llama_ssp.ranks.comms import Comm, Mesh
from llama_ssp.ranks.result_queue import ResultQueue

if TYPE_CHECKING:
    from llama_ssp.ranks.failures import ControlChannel
    from llama_ssp.settings.layout import Layout


@dataclass
class Watch:
    """What a queue asks the control channel."""

    missing: Callable[[], tuple[int, ...]] = tuple
    failed: Callable[[], bool] = bool

    @property
    def has_failed(self) -> bool:
        return self.failed()

    def be_alert(self) -> None:
        """Start no heartbeat."""


def _stage(
    *, num_copies: int, monkeypatch: pytest.MonkeyPatch, watch: Watch | None = None, ranks_per_copy: int = 1
) -> list[ResultQueue]:
    """One end for each rank, all of the same stage."""
    store, size = HashStore(), ranks_per_copy * num_copies
    monkeypatch.setattr(result_queue, "_stages", iter([7] * size))
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    layout = cast("Layout", None)
    ends = []
    for rank in range(size):
        number, place = divmod(rank, ranks_per_copy)
        world, replica = Comm(rank=rank, size=size), Comm(rank=place, size=ranks_per_copy)
        mesh = Mesh(world=world, replica=replica, number=number, layout=layout, target=None, draft=None)
        ends.append(ResultQueue(mesh, watch=cast("ControlChannel", watch or Watch()), patience_s=0.3))
    return ends


@pytest.mark.parametrize("who_stopped", [None, 0, 2, 3])
def test_rank_0_hears_every_text_once_and_all_hear_whether_one_was_stopped(
    who_stopped: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = _stage(ranks_per_copy=2, num_copies=3, monkeypatch=monkeypatch)
    heard: list[str] = []

    def work(rank: int) -> bool:
        number = rank // 2
        for place in range(number * 2):
            ends[rank].tell(f"copy {number}, text {place}")
        stopped = who_stopped is not None and number == who_stopped // 2
        return ends[rank].end(stopped=stopped, take=heard.append)

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(work, range(6)))
    assert sorted(heard) == [f"copy {number}, text {place}" for number in (1, 2) for place in range(number * 2)]
    assert [text for text in heard if "copy 2" in text] == [f"copy 2, text {place}" for place in range(4)]
    assert outcomes == [who_stopped is not None] * 6


def test_copies_claim_every_place_of_a_list_once_and_ranks_of_a_copy_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = _stage(ranks_per_copy=1, num_copies=3, monkeypatch=monkeypatch)

    def claim(rank: int) -> list[int]:
        firsts = [(ends[rank].claim(number), number) for number in (1, 2, 3) * 5]
        return [place for first, number in firsts for place in range(first, first + number)]

    with ThreadPoolExecutor(3) as pool:
        claimed = sorted(place for places in pool.map(claim, range(3)) for place in places)
    assert claimed == [*range(3 * 30)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_wait_at_once_and_what_its_copy_had_told_is_kept(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[bool] = []

    def has_failed() -> bool:
        if killed == [True]:
            ends[1 - rank].tell("finished just before")
            killed.append(True)
        return bool(killed)

    ends = _stage(num_copies=2, monkeypatch=monkeypatch, watch=Watch(failed=has_failed))
    heard: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends[rank].end, stopped=False, take=heard.append)
        time.sleep(0.2)
        assert not waiting.done(), "a copy that has ended its share is no fault"
        killed.append(True)
        try:
            with pytest.raises(dist.DistStoreError):
                waiting.result(timeout=60)
        finally:
            ends[1 - rank].end(stopped=False, take=heard.append) if not waiting.done() else None
    assert heard == ["finished just before"][rank:]


@pytest.mark.parametrize("patience_s", [4.0, 20.0, 60.0])
def test_a_stopped_rank_ends_the_stage_within_one_and_a_half_times_its_patience(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides a second for each of two calls, one that it still answers and the last."""
    now_s = 0.0

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def missing() -> tuple[int, ...]:
        wait(1.0)
        return (1,)

    queue, _ = _stage(num_copies=2, monkeypatch=monkeypatch, watch=Watch(missing=missing))
    monkeypatch.setattr(result_queue, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=wait))
    queue._patience_s, queue._called_s = patience_s, 0.0
    with pytest.raises(dist.DistStoreError, match="a rank does not answer"):
        queue.end(stopped=False, take=lambda _: None)
    assert patience_s <= now_s <= 1.5 * patience_s + 2
