"""How ranks meet: what each tells the others, the device of each, and one group with a backend for each memory."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.errors import LostRankError, PlacementError
from llama_ssp.ranks import rendezvous
from llama_ssp.ranks.process import Ranks, listen, signals_kept
from llama_ssp.ranks.rendezvous import Seen, choose_device, note_on_peers, open_store, seen_by_all, wait_for_all
from llama_ssp.settings.schema import DeviceKind
from tests.helpers.sockets import listeners

FIRST, SECOND = (Ranks(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    opened = HashStore()
    monkeypatch.setattr(rendezvous, "open_store", lambda *_, **__: opened)
    seen_by_all.cache_clear()
    yield opened
    seen_by_all.cache_clear()


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        (("0.0.9", torch.__version__, ""), r"has llama_ssp 0\.1\.0, and rank 0 on there has 0\.0\.9: install the same"),
        ((version("llama_ssp"), "2.11.0", ""), r"has torch \S+, and rank 0 on there has 2\.11\.0: "),
        ((version("llama_ssp"), torch.__version__, "2.28.9"), r"has NCCL unknown, and rank 0 on there has 2\.28\.9: "),
    ],
)
def test_versions_that_differ_are_named_before_ranks_connect(
    theirs: tuple[str, ...], sentence: str, store: HashStore
) -> None:
    store.set("llama_ssp/seen/cpu/0", json.dumps(Seen("there", 2, (0, 1), versions=theirs)))
    with pytest.raises(PlacementError, match=rf"rank 1 on \S+ {sentence}"):
        seen_by_all(SECOND, DeviceKind.cpu, timeout_s=0.1)


def test_a_rank_that_says_nothing_is_named(store: HashStore) -> None:
    with pytest.raises(LostRankError, match=r"rank 0 did not connect within timeouts\.load_s=0\.1") as caught:
        seen_by_all(SECOND, DeviceKind.cpu, timeout_s=0.1)
    assert caught.value.speaks
    assert store.check(["llama_ssp/seen/cpu/1"]), "else the others would wait for this rank"


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("launcher", "starts"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "torchrun has to start them, on every node"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"},
            "each of the 2 tasks of this SLURM step has to run this command; in a shell of one of them, srun --overlap",
        ),
    ],
    ids=["torchrun", "srun"],
)
@pytest.mark.parametrize(
    "wait",
    [
        lambda store: wait_for_all(store, ["here/0", "here/1"], ranks=SECOND, timeout_s=1.5),
        lambda _: open_store(SECOND, timeout_s=1.5),
    ],
    ids=["rank", "store"],
)
def test_a_long_wait_says_for_which_ranks_and_what_starts_them(
    wait: Callable[[HashStore], object],
    launcher: dict[str, str],
    starts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET_S", 0.1)
    monkeypatch.setattr(rendezvous, "_HEED_EVERY_S", 0.2)
    for name, value in {**launcher, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    (store := HashStore()).set("here/1", "")
    with pytest.raises(LostRankError):
        wait(store)
    assert capsys.readouterr().err.startswith(f"waiting for rank 0 until timeouts.load_s=1.5: {starts}")


def test_a_store_that_ends_is_not_called_a_timeout() -> None:
    class Ended(HashStore):
        def wait(self, *_: object) -> None:
            raise dist.DistNetworkError("connection reset")

    (store := Ended()).set("here/1", "")
    with pytest.raises(LostRankError, match="rank 0 did not connect before the store of the ranks had ended"):
        wait_for_all(store, ["here/0", "here/1"], ranks=SECOND, timeout_s=600.0)


@pytest.mark.parametrize(
    ("theirs", "mine", "device"),
    [
        (("here", 2, 2), (2,), torch.device("cuda", 1)),
        (("here", 2, 1, "1"), (1, "1"), CPU),
        (("here", 2, 1, "1"), (1, "2"), GPU),
        (("here", 2, 1, "1"), (1,), CPU),
        (("there", 2, 1, "1"), (1, "1"), GPU),
        (("there", 2, 2), (1, "1"), GPU),
        (("there", 2, 2), (2,), torch.device("cuda", 1)),
        (("there", 2, 0), (2,), CPU),
        (("here", 2, 0), (1, "1"), CPU),
        (("here", 2, 0), (2,), CPU),
        (("here", 2, 2), (1, "1"), CPU),
        (("here", 2, 1, "1"), (2,), CPU),
        (("here", 3, 2, "12"), (2, "34"), GPU),
        (("here", 3, 2, "12"), (2, "23"), CPU),
    ],
    ids=[
        "both",
        "one for both",
        "one each",
        "one that does not start",
        "two hosts",
        "enough on the other host",
        "on both hosts",
        "none on the other host",
        "none there",
        "both or none",
        "both or one",
        "one or both",
        "two each",
        "one is shared",
    ],
)
def test_ranks_choose_from_what_all_see(theirs: Any, mine: Any, device: torch.device) -> None:
    """Of two ranks the second: host, ranks of the node, GPUs and their ids."""
    host, num_ranks, *gpus = theirs
    ranks = Ranks(rank=1, size=2, local_rank=1, local_size=num_ranks)
    seen = [Seen(host, num_ranks, (), *gpus), Seen("here", num_ranks, (), *mine)]
    assert choose_device(DeviceKind.auto, ranks, seen)[0] == device
    assert choose_device(DeviceKind.cpu, ranks, seen) == (CPU, None)


def test_gpus_that_are_left_unused_are_a_note_and_those_that_are_missing_an_error() -> None:
    one = [Seen("here", 2, (), 1, ("1",))] * 2
    assert choose_device(DeviceKind.auto, SECOND, one)[1] == "2 ranks on a node with 1 GPUs: all ranks run on the CPU"
    assert choose_device(DeviceKind.auto, SECOND, [Seen("here", 2, ())] * 2) == (CPU, None)
    with pytest.raises(PlacementError, match="this node has 1 for 2: start at most 1 ranks"):
        choose_device(DeviceKind.cuda, SECOND, one)
    with pytest.raises(PlacementError, match="node there has 0 for 2: use device=cpu"):
        choose_device(DeviceKind.cuda, FIRST, [Seen("here", 2, (), 2), Seen("there", 2, ())])


def test_gpus_that_do_not_reach_each_other_are_named_in_a_sentence() -> None:
    assert note_on_peers(0, lambda _one, _other: False) is None
    assert note_on_peers(4, lambda _one, _other: True) is None
    note = note_on_peers(4, lambda one, other: one // 2 == other // 2)
    assert note
    assert note.startswith(
        "GPUs 0 and 2, 0 and 3, 1 and 2, 1 and 3 do not reach each other's memory: what they exchange"
    )
    assert "0 and 4, ... do" in str(note_on_peers(8, lambda _one, _other: False))


def test_the_store_of_rank_0_listens_on_the_loopback_and_a_port_that_is_taken_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listen("127.0.0.1") as free:
        port = str(free.getsockname()[1])
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    for name, value in {**environ, "MASTER_ADDR": socket.gethostname()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "_stores", {})
    held, theirs = open_store(FIRST, timeout_s=5.0), open_store(SECOND, timeout_s=5.0)
    held.set("key", "value")
    assert theirs.get("key") == b"value"
    assert {str(address) for address, used in listeners(os.getpid()) if used == int(port)} == {"127.0.0.1"}
    words = rf"rank 0 cannot reach the others, 127\.0\.0\.1:{port}: address already in use.*; another MASTER_PORT"
    with pytest.raises(LostRankError, match=words):
        open_store(replace(FIRST, local_size=1), timeout_s=5.1)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "wait",
    [
        lambda: open_store(SECOND, timeout_s=40.0),
        lambda: wait_for_all(HashStore(), ["llama_ssp/here/0"], ranks=SECOND, timeout_s=40.0),
    ],
    ids=["a store that is not there", "a rank that does not come"],
)
def test_a_signal_ends_the_wait_for(wait: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    begin_s = time.monotonic()
    with signals_kept():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        stop.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        stop.join()
    assert time.monotonic() - begin_s < 20
