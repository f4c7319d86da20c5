"""How ranks meet: one group, with a backend for each kind of memory, and no watchdog that aborts without a sentence."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.errors import LostRankError
from llama_ssp.ranks import rendezvous
from llama_ssp.ranks.environment import Ranks, listen
from llama_ssp.ranks.rendezvous import meet, open_store, wait_for_all
from tests.helpers.sockets import listeners

RANKS = Ranks(rank=1, size=2, local_rank=1, local_size=2)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the process group was made with; rank 0 is there."""
    store, found = HashStore(), dict[str, Any]()
    store.set("llama_ssp/here/0", "")
    monkeypatch.setattr(rendezvous, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: found.update(given, backend=backend))
    set_here = (*rendezvous._OWN_WATCHDOG, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in set_here:
        monkeypatch.delenv(name, raising=False)
    yield found
    for name in set_here:
        os.environ.pop(name, None)


def test_ranks_on_cpus_meet_through_gloo(met: dict[str, Any]) -> None:
    meet(RANKS, device=torch.device("cpu"), timeout_s=5.0)
    assert (met["backend"], met["device_id"], met["timeout"]) == ("gloo", None, timedelta(seconds=5))
    assert not rendezvous._OWN_WATCHDOG.keys() & os.environ.keys()


def test_ranks_on_gpus_have_nccl_for_tensors_and_gloo_for_texts(
    met: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    meet(RANKS, device=torch.device("cuda", 1), timeout_s=5.0)
    assert (met["backend"], met["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"


def test_a_rank_that_does_not_come_is_named(met: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(rendezvous, "open_store", lambda *_, **__: store)
    with pytest.raises(LostRankError, match=r"rank 0 did not connect within timeouts\.load_s=0\.1") as caught:
        meet(RANKS, device=torch.device("cpu"), timeout_s=0.1)
    assert caught.value.speaks
    assert met == {}


def test_the_store_of_rank_0_listens_on_the_loopback_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1") as free:
        port = str(free.getsockname()[1])
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    for name, value in {**environ, "MASTER_ADDR": socket.gethostname()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = open_store(replace(RANKS, rank=0, local_rank=0), timeout_s=5.0)
    theirs = open_store(RANKS, timeout_s=5.0)
    store.set("key", "value")
    assert theirs.get("key") == b"value"
    assert {str(address) for address, used in listeners(os.getpid()) if used == int(port)} == {"127.0.0.1"}


def test_a_port_that_is_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        words = rf"rank 0 cannot reach the others, 127\.0\.0\.1:{port}: address already in use.*; another MASTER_PORT"
        with pytest.raises(LostRankError, match=words):
            open_store(replace(RANKS, rank=0, local_rank=0), timeout_s=5.1)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "wait",
    [
        lambda: open_store(RANKS, timeout_s=40.0),
        lambda: wait_for_all(HashStore(), ["llama_ssp/here/0"], ranks=RANKS, timeout_s=40.0),
    ],
    ids=["a store that is not there", "a rank that does not come"],
)
def test_a_signal_ends_the_wait_for(wait: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    stop = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    begin_s = time.monotonic()
    try:
        stop.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        stop.join()
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - begin_s < 20
