"""How ranks meet: one group, with a backend for each kind of memory, and no watchdog that aborts without a sentence."""

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.distributed import rendezvous
from llama_ssp.distributed.environment import Ranks
from llama_ssp.distributed.rendezvous import meet
from llama_ssp.errors import LostRankError

RANKS = Ranks(rank=1, size=2, local_rank=1, local_size=2)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the process group was made with; rank 0 is there."""
    store, found = HashStore(), dict[str, Any]()
    store.set("llama_ssp/here/0", "")
    monkeypatch.setattr(rendezvous, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: found.update(given, backend=backend))
    for name in rendezvous._OWN_WATCHDOG:
        monkeypatch.delenv(name, raising=False)
    yield found
    for name in rendezvous._OWN_WATCHDOG:
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
