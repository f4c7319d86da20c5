"""Which device a rank computes on, also where ranks see different GPUs."""

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.errors import LostRankError, PlacementError
from llama_ssp.ranks.environment import Ranks
from llama_ssp.ranks.gpu import choice
from llama_ssp.ranks.gpu.choice import Seen, choose_device
from llama_ssp.settings.schema import DeviceKind

FIRST, SECOND = (Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """The store where ranks meet."""
    opened = HashStore()
    monkeypatch.setattr(choice, "open_store", lambda *_, **__: opened)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    choice._seen_by_all.cache_clear()
    return opened


def sees(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[str], *, starts: bool = True) -> None:
    """Let this rank see these GPUs."""

    def properties(index: int) -> SimpleNamespace:
        if not starts:
            raise RuntimeError("the driver is too old")
        return SimpleNamespace(uuid=gpus[index])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def chosen(store: HashStore, theirs: Seen, *, kind: DeviceKind = DeviceKind.auto) -> tuple[torch.device, str | None]:
    """What the second of two ranks chooses."""
    store.set("llama_ssp/gpus/0", json.dumps(theirs))
    return choose_device(kind, SECOND, timeout_s=0.1)


@pytest.mark.parametrize("kind", [DeviceKind.auto, DeviceKind.cuda])
def test_a_single_rank_asks_nobody(kind: DeviceKind, store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Ranks(rank=0, size=1, local_rank=0, local_size=1)
    sees(monkeypatch, ["1", "2"])
    assert choose_device(kind, alone, timeout_s=0.1) == (GPU, None)
    assert choose_device(DeviceKind.cpu, alone, timeout_s=0.1) == (CPU, None)
    sees(monkeypatch, [])
    assert choose_device(DeviceKind.auto, alone, timeout_s=0.1) == (CPU, None)
    assert store.num_keys() == 0


def test_every_rank_has_a_gpu_or_none_has_and_a_sentence_says_so(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sees(monkeypatch, ["1", "2"])
    assert chosen(store, Seen("here", 2, 2)) == (torch.device("cuda", 1), None)
    assert chosen(store, Seen("here", 2, 2), kind=DeviceKind.cpu) == (CPU, None)
    sees(monkeypatch, ["1"])
    one = Seen("here", 2, 1, ("1",))
    assert chosen(store, one) == (CPU, "2 ranks on a node with 1 GPUs: all ranks run on the CPU")
    with pytest.raises(PlacementError, match="this node has 1 for 2: start at most 1 ranks"):
        chosen(store, one, kind=DeviceKind.cuda)


@pytest.mark.parametrize(
    ("theirs", "mine", "device"),
    [
        (Seen("here", 2, 1, ("1",)), ["2"], GPU),
        (Seen("here", 2, 1, ("1",)), ["1"], CPU),
        (Seen("there", 2, 1, ("1",)), ["1"], GPU),
        (Seen("there", 2, 2), ["1"], GPU),
        (Seen("there", 2, 2), ["1", "2"], torch.device("cuda", 1)),
        (Seen("there", 2, 0), ["1", "2"], CPU),
        (Seen("here", 2, 0), ["1"], CPU),
        (Seen("here", 2, 0), ["1", "2"], CPU),
        (Seen("here", 2, 2), ["1"], CPU),
        (Seen("here", 2, 1, ("1",)), ["1", "2"], CPU),
        (Seen("here", 3, 2, ("1", "2")), ["3", "4"], GPU),
        (Seen("here", 3, 2, ("1", "2")), ["2", "3"], CPU),
    ],
    ids=[
        "one each", "one for both", "two hosts", "enough on the other host", "on both hosts", "none on the other host",
        "none there", "both or none", "both or one", "one or both", "two each", "one is shared",
    ],
)  # fmt: skip
def test_ranks_choose_from_what_all_see(
    theirs: Seen, mine: list[str], device: torch.device, store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(rank=1, size=2, local_rank=1, local_size=theirs.num_ranks)
    store.set("llama_ssp/gpus/0", json.dumps(theirs))
    sees(monkeypatch, mine)
    assert choose_device(DeviceKind.auto, ranks, timeout_s=0.1)[0] == device


def test_gpus_that_do_not_start_are_nobodys_own(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, ["2"], starts=False)
    assert chosen(store, Seen("here", 2, 1, ("1",)))[0] == CPU


@pytest.mark.parametrize("mine", [[], ["1", "2"]], ids=["none", "one for each"])
def test_a_rank_that_could_choose_alone_says_what_it_sees(
    mine: list[str], store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those that see other GPUs would wait for it."""
    sees(monkeypatch, mine)
    chosen(store, Seen("here", 2, 1, ("1",)))
    store.wait(["llama_ssp/gpus/1"], timedelta(seconds=0.1))


@pytest.mark.usefixtures("store")
def test_a_rank_without_gpus_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, [])
    assert choose_device(DeviceKind.auto, SECOND, timeout_s=0.1) == (CPU, None)


@pytest.mark.usefixtures("store")
def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sees(monkeypatch, ["1"])
    with pytest.raises(LostRankError, match=r"rank 0 did not connect within timeouts\.load_s=0\.1") as caught:
        choose_device(DeviceKind.auto, SECOND, timeout_s=0.1)
    assert caught.value.speaks


def test_a_rank_without_the_gpus_that_are_required_is_an_error_of_all(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rank 0, which keeps the store until the other has read what it sees."""
    store.set("llama_ssp/gpus/1", json.dumps(Seen("there", 2, 0)))
    sees(monkeypatch, ["1", "2"])
    with pytest.raises(LostRankError, match="rank 1 did not connect"):
        choose_device(DeviceKind.cuda, FIRST, timeout_s=0.1)
    choice._seen_by_all.cache_clear()
    other = Thread(target=store.set, args=("llama_ssp/gpus/1/read", ""))
    other.start()
    with pytest.raises(PlacementError, match="node there has 0 for 2: use device=cpu"):
        choose_device(DeviceKind.cuda, FIRST, timeout_s=5.0)
    other.join()
