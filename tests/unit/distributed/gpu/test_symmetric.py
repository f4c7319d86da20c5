"""A group of GPUs has a window if all of its ranks can make one, and none of them waits for one that cannot."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llama_ssp.distributed import comms
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.gpu.symmetric import NUM_BYTES, SymmetricWindow

CPU = torch.device("cpu")


class Group:
    """A group whose backend fails at a step, or at none."""

    group_name = "7"

    def __init__(self, fails_at: str = "never") -> None:
        self._fails_at = fails_at
        self.registered: list[object] = []

    def _get_backend(self, _device: torch.device) -> "Group":
        return self

    @property
    def mem_allocator(self) -> str:
        if self._fails_at == "allocate":
            raise AttributeError("this torch has none")
        return "NCCL's"

    def register_mem_pool(self, pool: object, *, symm: bool) -> None:
        assert symm
        self.registered.append(pool)
        if self._fails_at == "register":
            raise RuntimeError("NCCL has no windows")


@pytest.fixture(autouse=True)
def _pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator} memory")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *_: nullcontext())


def join(group: Group, others_fail_at: str = "never") -> tuple[SymmetricWindow | None, list[str]]:
    """Join a group of two, and what this rank told the other."""
    told: list[str] = []

    def gather_text(text: str) -> list[str]:
        told.append(text)
        step = ["allocate", "register"][len(told) - 1]
        return [text, "" if others_fail_at == step else "done"]

    return SymmetricWindow.join(group, gather_text, CPU), told  # type: ignore[arg-type] # a fake


def test_memory_of_nccl_s_own_is_registered_as_symmetric() -> None:
    group = Group()
    window, told = join(group)
    assert window
    assert (group.registered, told) == (["pool of NCCL's memory"], ["allocated", "registered"])


@pytest.mark.parametrize(
    ("mine", "theirs", "told", "num_registered"),
    [
        ("allocate", "never", [""], 0),
        ("never", "allocate", ["allocated"], 0),
        ("register", "never", ["allocated", ""], 1),
        ("never", "register", ["allocated", "registered"], 1),
    ],
)
def test_a_rank_that_cannot_leaves_the_group_without_a_window(
    mine: str, theirs: str, told: list[str], num_registered: int
) -> None:
    group = Group(mine)
    assert join(group, theirs) == (None, told)
    assert len(group.registered) == num_registered


def test_a_part_that_fits_lies_at_the_begin_of_the_window() -> None:
    memory = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    place = SymmetricWindow(memory, None).place(3, 8, torch.float16)
    assert place is not None
    assert (place.shape, place.dtype, place.data_ptr()) == ((3, 8), torch.float16, memory.data_ptr())
    most = NUM_BYTES // 8
    assert SymmetricWindow(memory, None).place(4, most, torch.float16) is not None
    assert SymmetricWindow(memory, None).place(4, most + 1, torch.float16) is None


def test_a_group_of_gpus_makes_its_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(comms, "_windows", {})
    monkeypatch.setattr(comms, "_groups", {(0, 1): Group()})

    def join(*given: object) -> SimpleNamespace:
        made.append(given)
        return SimpleNamespace()

    monkeypatch.setattr(SymmetricWindow, "join", join)
    gpus = Comm(rank=0, size=2, members=(0, 1), device=torch.device("cuda", 0))
    assert gpus.with_window().window is gpus.with_window().window is not None
    assert len(made) == 1
    for other in (replace(gpus, device=CPU), Comm.single()):
        assert other.with_window() is other
