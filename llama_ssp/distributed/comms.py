"""The few collectives that a run needs, over one group of ranks.

A group of one rank does nothing at all, so that the code above never asks how many ranks there are. Which ranks form a
group is decided in `mesh`, never here.
"""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from llama_ssp.distributed.one_shot import OneShot
from llama_ssp.distributed.operators import is_recording, record
from llama_ssp.distributed.shared_memory import SLOT_BYTES, SharedMemoryGroup


@dataclass(frozen=True, kw_only=True)
class Comm:
    """This rank's end of one group.

    Attributes:
        rank: position inside the group, 0 to size - 1.
        size: number of ranks in the group.
        group: the process group; None for a group of one.
        device: where tensors must live to be sent.
        crowded: whether this rank shares its cores with more ranks than there are of them.
        board: the memory that a group of CPUs shares; small messages of a round go through it.
        tries_one_shot: whether groups of GPUs look for such a memory.
        one_shot: the memory that a group of GPUs shares, where small sums are faster that way.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    crowded: bool = False
    board: SharedMemoryGroup | None = None
    tries_one_shot: bool = True
    one_shot: OneShot | None = None

    @classmethod
    def of_world(cls, *, rank: int, size: int, device: torch.device, crowded: bool, tries_one_shot: bool) -> "Comm":
        """The group of all ranks, which call this together.

        Args:
            rank: of this process.
            size: number of all.
            device: where this rank computes.
            crowded: see the class.
            tries_one_shot: see the class.
        """
        group = dist.group.WORLD
        comm = cls(rank=rank, size=size, group=group, device=device, crowded=crowded, tries_one_shot=tries_one_shot)
        return comm._with_shared_memory(tuple(range(size)))

    @classmethod
    def single(cls) -> Self:
        """The group that holds this rank alone."""
        return cls(rank=0, size=1, group=None)

    def subgroup(self, members: tuple[int, ...]) -> "Comm | None":
        """Form a group of some of the ranks; all ranks of this group, which is the world's, call it together.

        Args:
            members: their ranks, increasing.

        Returns:
            This rank's end of it; None where this rank is not a member.
        """
        if len(members) == self.size:
            return self
        group = _group_of(members) if len(members) > 1 else None
        if self.rank not in members:
            return None
        if group is None:
            return Comm.single()
        rank, size = members.index(self.rank), len(members)
        comm = replace(self, rank=rank, size=size, group=group, board=None, one_shot=None)
        return comm._with_shared_memory(members)

    def _with_shared_memory(self, members: tuple[int, ...]) -> "Comm":
        """The same end with memory that the group shares, where it can; made once for all jobs of a sweep."""
        assert self.group
        if self.device.type == "cpu":
            if members not in _boards:
                _boards[members] = SharedMemoryGroup.join(
                    self.gather_text, rank=self.rank, size=self.size, crowded=self.crowded
                )
            return replace(self, board=_boards[members])
        if not self.tries_one_shot:
            return self
        if members not in _one_shots:
            _one_shots[members] = OneShot.join(self.group, self.gather_text, self.device)
        return replace(self, one_shot=_one_shots[members])

    def all_reduce(self, values: Tensor) -> Tensor:
        """Add up `values` over the group, in place where it can; returns the sum, the same bits everywhere."""
        if self.size > 1 and is_recording():
            return record("all_reduce", self, values)
        if self.board and values.nbytes <= SLOT_BYTES:
            self.board.all_reduce(values)
        elif self.one_shot and self.one_shot.takes(values):
            return self.one_shot.all_reduce(values)
        elif self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Join the slices of all ranks along the last dimension.

        Args:
            values: this rank's slice (..., sizes[rank]).
            sizes: width of each rank's slice; they may differ.

        Returns:
            A tensor (..., sum(sizes)), the same on every rank.
        """
        if self.size == 1:
            return values
        if is_recording():
            return record("all_gather_last", self, values, list(sizes))
        widest = max(sizes)
        if self.board and widest * values.shape[:-1].numel() * values.itemsize <= SLOT_BYTES:
            return self.board.all_gather_last(values, sizes)
        if values.shape[-1] < widest:
            values = torch.nn.functional.pad(values, (0, widest - values.shape[-1]))
        values = values.contiguous()
        slices = [torch.empty_like(values) for _ in sizes]
        dist.all_gather(slices, values, group=self.group)
        return torch.cat([part[..., :width] for part, width in zip(slices, sizes, strict=True)], dim=-1)

    def broadcast(self, values: Tensor, *, src: int) -> Tensor:
        """Give every rank the values of group rank `src`, in place."""
        if self.size > 1 and is_recording():
            return record("broadcast", self, values, src)
        if self.board and values.nbytes <= SLOT_BYTES:
            self.board.broadcast(values, src=src)
        elif self.size > 1:
            dist.broadcast(values, group=self.group, group_src=src)
        return values

    def send(self, values: Tensor, *, dst: int) -> Tensor:
        """Give values to group rank `dst` alone, which calls `receive` for them; they are returned."""
        if is_recording():
            return record("send", self, values, dst)
        dist.send(values.contiguous(), group=self.group, group_dst=dst)
        return values

    def receive(self, values: Tensor, *, src: int) -> Tensor:
        """Take what group rank `src` sends, in place."""
        if is_recording():
            return record("receive", self, values, src)
        dist.recv(values, group=self.group, group_src=src)
        return values

    def gather_text(self, text: str) -> list[str]:
        """Collect a text from every rank, in order of rank. For set-up only: it reads from the device."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)], device=self.device), group=self.group)
        sizes = tuple(int(length) for length in lengths)
        joined = self.all_gather_last(data, sizes)
        return [bytes(part.tolist()).decode() for part in joined.split(sizes)]

    def broadcast_text(self, text: str, *, src: int) -> str:
        """Give every rank the text of group rank `src`. For set-up only: it reads from the device."""
        return self.gather_text(text if self.rank == src else "")[src]

    def barrier(self) -> None:
        """Wait until every rank of the group has come here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def set_timeout(self, seconds: float) -> None:
        """Let later collectives of this group give up after `seconds`."""
        if self.board:
            self.board.timeout_s = seconds
        if self.size > 1:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self.group)  # there is no public setter


_boards: dict[tuple[int, ...], SharedMemoryGroup | None] = {}
_one_shots: dict[tuple[int, ...], OneShot | None] = {}


@cache
def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    """A process group of some of the world's ranks, made once for all jobs of a sweep."""
    group: dist.ProcessGroup = dist.new_group(list(members))
    return group
