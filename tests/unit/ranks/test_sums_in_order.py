"""Sums of CPUs add the parts of the ranks in the order of ranks, whatever the size of a message."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm

PARTS = [torch.tensor([1e8, 1.0, 3.0, 1e-3]), torch.tensor([1.0, 1e8, 1e-3, 1e8]), torch.tensor([-1e8, -1e8, 1e8, 1.0])]
IN_ORDER = PARTS[0] + PARTS[1] + PARTS[2]


def test_a_message_beyond_a_slot_is_summed_in_pieces_of_a_slot() -> None:
    pieces: list[Tensor] = []

    def all_reduce(values: Tensor) -> None:
        place = sum(map(len, pieces))
        values.copy_(IN_ORDER[place : place + len(values)])
        pieces.append(values)

    board: Any = Mock(most_bytes=12, all_reduce=all_reduce)
    values = PARTS[0].clone().view(2, 2)
    assert Comm(rank=0, size=3, board=board).do_all_reduce(values).equal(IN_ORDER.view(2, 2))
    assert [len(piece) for piece in pieces] == [3, 1]


def test_without_shared_memory_parts_are_gathered_and_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(into: list[Tensor], values: Tensor, **_group: object) -> None:
        assert values.equal(PARTS[1])
        for part, own in zip(into, PARTS, strict=True):
            part.copy_(own)

    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    others = PARTS[1] + PARTS[2] + PARTS[0]
    assert not others.equal(IN_ORDER), "the order shows"
    assert Comm(rank=1, size=3).do_all_reduce(PARTS[1].clone()).equal(IN_ORDER)
