"""What is read when, by whom, and how much of it is on its way."""

import threading

import pytest
import torch
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.models.weights import ReadAhead

KEYS = list(range(8))


class Files:
    """Tensors by number; remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.threads: set[str] = set()
        self.began = threading.Semaphore(0)

    def read(self, key: int) -> Tensor:
        self.asked.append(key)
        self.threads.add(threading.current_thread().name)
        self.began.release()
        return torch.tensor(key)


@pytest.mark.parametrize("num_ahead", [0, 1, 3, 20])
@pytest.mark.parametrize("order", [KEYS, [1, 2, 3, 5, 6, 0, 4, 7]])
def test_everything_is_read_once_whatever_the_order(num_ahead: int, order: list[int]) -> None:
    files = Files()
    ahead = ReadAhead(files.read, KEYS, num_ahead=num_ahead)
    assert [int(ahead.take(key)) for key in order] == order
    assert sorted(files.asked) == KEYS
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read")]


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_so_many_more_are_read_while_the_first_is_used(num_ahead: int) -> None:
    files = Files()
    ahead = ReadAhead(files.read, KEYS, num_ahead=num_ahead)
    ahead.take(0)
    for _ in range(num_ahead + 1):
        assert files.began.acquire(timeout=20)
    assert sorted(files.asked) == [*range(num_ahead + 1)]
    assert len(files.threads) >= min(num_ahead + 1, 2)
    for key in KEYS[1:]:
        ahead.take(key)


def test_a_fault_that_a_thread_meets_is_raised_where_the_tensor_is_wanted() -> None:
    def read(key: int) -> Tensor:
        if key == 1:
            raise CheckpointError("the file has changed")
        return torch.tensor(key)

    ahead = ReadAhead(read, [0, 1], num_ahead=1)
    ahead.take(0)
    with pytest.raises(CheckpointError, match="the file has changed"):
        ahead.take(1)
