"""Which device a rank computes on, also where each rank sees its own GPU only."""

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it

from llama_ssp.config.schema import DeviceKind
from llama_ssp.distributed.environment import Ranks
from llama_ssp.distributed.gpu import choice
from llama_ssp.distributed.gpu.choice import choose_device, sees_own_gpu
from llama_ssp.errors import PlacementError

FIFTH_OF_EIGHT = Ranks(rank=5, size=8, local_rank=1, local_size=4)


def test_every_rank_has_a_gpu_or_none_has_and_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device(DeviceKind.auto, FIFTH_OF_EIGHT) == (torch.device("cuda", 1), None)
    assert choose_device(DeviceKind.cpu, FIFTH_OF_EIGHT) == (torch.device("cpu"), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    device, note = choose_device(DeviceKind.auto, FIFTH_OF_EIGHT)
    assert device.type == "cpu"
    assert note == "4 ranks on a node with 3 GPUs: all ranks run on the CPU"
    with pytest.raises(PlacementError, match="at most 3 ranks"):
        choose_device(DeviceKind.cuda, FIFTH_OF_EIGHT)


def test_a_rank_that_sees_its_own_gpu_only_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for kind in (DeviceKind.auto, DeviceKind.cuda):
        assert choose_device(kind, FIFTH_OF_EIGHT, sees_own=lambda: True) == (torch.device("cuda", 0), None)
    assert choose_device(DeviceKind.auto, FIFTH_OF_EIGHT, sees_own=lambda: False)[0].type == "cpu"


def test_ranks_are_not_asked_where_no_gpu_or_one_for_each_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus in (0, 4):
        monkeypatch.setattr(torch.cuda, "device_count", lambda number=num_gpus: number)
        choose_device(DeviceKind.auto, FIFTH_OF_EIGHT, sees_own=lambda: pytest.fail("the ranks were asked"))


@pytest.fixture(autouse=True)
def _cache() -> Iterator[None]:
    sees_own_gpu.cache_clear()
    yield
    sees_own_gpu.cache_clear()


@pytest.mark.parametrize(
    ("theirs", "mine", "own"),
    [
        (["here 1"], ["2"], True),
        (["here 1"], ["1"], False),
        (["there 1"], ["1"], True),
        ([], ["1"], False),
        (["here 1"], [], False),
        (["here 1", "here 2"], ["3", "4"], True),
        (["here 1", "here 2"], ["2", "3"], False),
    ],
    ids=["one each", "one for both", "two hosts", "CUDA does not start there", "nor here", "two each", "one is shared"],
)
def test_gpus_are_a_ranks_own_if_no_rank_of_its_host_sees_them_too(
    theirs: list[str], mine: list[str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    store.set("llama_ssp/gpus/0", json.dumps(theirs))
    monkeypatch.setattr(choice, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    seen = [SimpleNamespace(uuid=gpu) for gpu in mine]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen) or 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen[index] if seen else _no_driver())
    assert sees_own_gpu(Ranks(rank=1, size=2, local_rank=1, local_size=2), timeout_s=5.0) is own


def _no_driver() -> SimpleNamespace:
    raise RuntimeError("the driver is too old")
