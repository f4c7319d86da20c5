"""The groups of ranks of a run, and their collectives.

In a group of one rank they do nothing, so callers need not check the number of ranks. `build_mesh` decides which ranks
form a group. Between GPUs, tensors go through NCCL, and texts through gloo, where a lost rank is an error.

A device may have collectives that a trace can hold, and memory that ranks share for small messages; see `operators`.
"""

import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from llama_ssp.ranks.gpu import MOST_WORK_S, DeviceWait
from llama_ssp.registry import operators
from llama_ssp.settings.layout import Layout

_ALIKE_S, _LOOK_EVERY_S = 5.0, 0.02
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # older torch


class Board(Protocol):
    """Memory that the ranks of a group share for messages of up to `most_bytes`."""

    most_bytes: int
    timeout_s: float

    def all_reduce(self, values: Tensor) -> None:
        """Sum contiguous values over the group, in place; the same bits on all ranks."""

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """See `Comm.all_gather_last`."""

    def deliver(self, values: Tensor | None, *, src: int) -> None:
        """Copy the contiguous values of rank `src` to the ranks that give values; the others, with None, count it."""


class OwnSums(Protocol):
    """Sums over the GPUs of a node without NCCL; see `operators`."""

    def takes(self, values: Tensor) -> bool:
        """Whether this object sums these values."""

    def takes_rows(self, part_ME: Tensor) -> bool:
        """Whether it adds the sum of such rows to a residual, and normalizes that."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum values in place; the same bits on all ranks."""

    def add_norm(self, part_ME: Tensor, x_ME: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Add the sum of the ranks' parts to x in place, and return its RMS norm."""


@dataclass(frozen=True, kw_only=True)
class Comm:
    """One group of ranks, as seen by this rank.

    Attributes:
        members: ranks of the world that form it, in increasing order; none for a group of one.
        device: the device of tensors to be sent.
        crowded: whether more ranks than cores share this rank's cores.
        board: memory shared by a group on CPUs, for small messages.
        peers: sums small tensors on GPUs; None leaves all to NCCL.
        device_wait: waits for this rank's GPU, if others may make it wait.
    """

    rank: int
    size: int
    members: tuple[int, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    crowded: bool = False
    board: Board | None = None
    peers: OwnSums | None = None
    device_wait: DeviceWait | None = None

    @classmethod
    def of_world(
        cls, *, rank: int, size: int, device: torch.device, crowded: bool, device_wait: DeviceWait | None = None
    ) -> "Comm":
        """Form the group of all ranks, which must call this together; for arguments see the class."""
        members = tuple(range(size))
        _groups[members] = dist.group.WORLD
        comm = cls(rank=rank, size=size, members=members, device=device, crowded=crowded, device_wait=device_wait)
        return comm._with_shared_memory()

    @classmethod
    def single(cls) -> Self:
        """Form a group of this rank only."""
        return cls(rank=0, size=1)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for a group of one. It is not kept, so that `leave_groups` can end its threads."""
        return _groups.get(self.members)

    def alone(self) -> "Comm":
        """The group of this rank only, which waits for its GPU as this group does."""
        return Comm(rank=0, size=1, device_wait=self.device_wait)

    def subgroup(self, members: tuple[int, ...]) -> "Comm | None":
        """Form a group of some ranks of the world, in increasing order; None if this rank is not a member.

        All ranks of the world must call this together.
        """
        if len(members) == self.size:
            return self
        if len(members) > 1 and members not in _groups:
            _groups[members] = dist.new_group(list(members))
        if self.rank not in members:
            return None
        if len(members) == 1:
            return self.alone()
        rank, size = members.index(self.rank), len(members)
        alike = replace(self, rank=rank, size=size, members=members, board=None, peers=None)
        return alike._with_shared_memory()

    def _with_shared_memory(self) -> "Comm":
        """Add shared memory, if the device has it; it is made once for all points of a sweep."""
        if self.members not in _boards:
            _boards[self.members] = operators.made("messages", self.device.type, self)
        return replace(self, board=_boards[self.members])

    def with_peers(self) -> "Comm":
        """Return this group, summing by an operator of its device if there is one; all its ranks call this together."""
        return replace(self, peers=operators.made("sums", self.device.type, self)) if self.size > 1 else self

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum `values` over the group, in place if possible; returns the sum, bit-identical on all ranks.

        On CPUs numbers are added in the order of ranks, so that the bits of a sum depend on no other number.
        """
        return self._run("all_reduce", values) if self.size > 1 else values

    def all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Concatenate the slices (..., sizes[rank]) of all ranks along the last dimension; sizes may differ."""
        return self._run("all_gather_last", values, sizes) if self.size > 1 else values

    def broadcast(self, values: Tensor, *, src: int) -> Tensor:
        """Broadcast the values of group rank `src`, in place."""
        return self._run("broadcast", values, src) if self.size > 1 else values

    def send(self, values: Tensor, *, dst: int) -> Tensor:
        """Send values to group rank `dst`, which must call `receive`; returns them."""
        return self._run("send", values, dst)

    def receive(self, values: Tensor, *, src: int) -> Tensor:
        """Receive the values that group rank `src` sends, in place."""
        return self._run("receive", values, src)

    def _run(self, name: str, values: Tensor, *more: int | tuple[int, ...]) -> Tensor:
        call = _collectives(values.device.type)
        result: Tensor = call(name, self, values, *more) if call else getattr(self, f"do_{name}")(values, *more)
        return result

    def do_all_reduce(self, values: Tensor) -> Tensor:
        """See `all_reduce`."""
        if self.peers and self.peers.takes(values):
            return self.peers.all_reduce(values)
        if self.board:
            for part in values.view(-1).split(self.board.most_bytes // values.itemsize):
                self.board.all_reduce(part)
        elif values.is_cuda:
            dist.all_reduce(values, group=self.group)
        else:  # a ring would add a number in an order that depends on its place
            parts = [torch.empty_like(values) for _ in range(self.size)]
            dist.all_gather(parts, values, group=self.group)
            torch.add(parts[0], parts[1], out=values)
            for part in parts[2:]:
                values.add_(part)
        return values

    def do_all_gather_last(self, values: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """See `all_gather_last`."""
        widest = max(sizes)
        if self.board and widest * values.shape[:-1].numel() * values.itemsize <= self.board.most_bytes:
            return self.board.all_gather_last(values, sizes)
        if values.shape[-1] < widest:
            values = torch.nn.functional.pad(values, (0, widest - values.shape[-1]))
        values = values.contiguous()
        if values.is_cuda:  # NCCL fills one tensor; into a list it would copy slice by slice
            joined = values.new_empty(self.size, *values.shape)
            _gather_into(joined, values, group=self.group)
            slices = [*joined.unbind()]
        else:
            slices = [torch.empty_like(values) for _ in sizes]
            dist.all_gather(slices, values, group=self.group)
        return torch.cat([part[..., :width] for part, width in zip(slices, sizes, strict=True)], dim=-1)

    def do_broadcast(self, values: Tensor, src: int) -> Tensor:
        """See `broadcast`."""
        if self.board and values.nbytes <= self.board.most_bytes:
            self.board.deliver(values, src=src)
        else:
            dist.broadcast(values, group=self.group, group_src=src)
        return values

    def do_send(self, values: Tensor, dst: int) -> Tensor:
        """See `send`."""
        dist.send(values.contiguous(), group=self.group, group_dst=dst)
        return values

    def do_receive(self, values: Tensor, src: int) -> Tensor:
        """See `receive`."""
        dist.recv(values, group=self.group, group_src=src)
        return values

    def deliver(self, values: Tensor | None, *, shape: tuple[int, ...], src: int, dst: int) -> None:
        """Copy contiguous fp32 values of a shape from rank `src` to rank `dst`. Collective: other ranks pass None."""
        if self.board and math.prod(shape) * torch.float32.itemsize <= self.board.most_bytes:
            self.board.deliver(values, src=src)
        elif values is not None and self.rank == src:
            self.send(values, dst=dst)
        elif values is not None:
            self.receive(values, src=src)

    def gather_text(self, text: str) -> list[str]:
        """Gather a text from every rank, in order of rank."""
        if self.size == 1:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
        sizes = tuple(int(length) for length in lengths)
        joined = self.all_gather_last(data, sizes)
        return [bytes(part.tolist()).decode() for part in joined.split(sizes)]

    def broadcast_text(self, text: str) -> str:
        """Broadcast the text of the group's first rank."""
        return self.gather_text(text if self.rank == 0 else "")[0]

    def all_say(self, words: str) -> bool:
        """Whether all ranks say the same within seconds, each after equal work of its device.

        No collective asks: a rank without anything to say may wait in one for this rank.
        """
        if self.size == 1:
            return True
        if self.device.type == "cuda":
            self.finish()
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + _ALIKE_S
        keys = [f"llama_ssp/{words}/{self.members}/{rank}" for rank in range(self.size)]
        number = store.add(keys[self.rank], 1)
        while not (is_said := all(store.add(key, 0) >= number for key in keys)) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return is_said

    def barrier(self) -> None:
        """Wait for every rank of the group, but not for its device."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait until this rank's GPU has passed an event; DistBackendError if it waits for a rank that is lost."""
        if self.device_wait:
            self.device_wait.until(event)
        else:
            event.synchronize()

    def finish(self) -> None:
        """Wait until this rank's GPU has done everything on the current stream; see `wait`."""
        passed = torch.cuda.Event()
        passed.record()
        self.wait(passed)

    def read(self, values: Tensor) -> Tensor:
        """Return values in the host's memory; see `wait`."""
        if values.device.type == "cpu":
            return values
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        self.finish()
        return host

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of later collectives of this group."""
        if self.board:
            self.board.timeout_s = seconds
        if self.device_wait:
            self.device_wait.timeout_s = seconds
        if self.group:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self.group)  # there is no public setter
            if self.device.type == "cuda":  # waits for the device end earlier, unless another host is at work
                nccl = self.group._get_backend(self.device)
                nccl._set_default_timeout(timedelta(seconds=seconds + MOST_WORK_S))


class Reads(Enum):
    """Part of a model's logits that is read on each of its ranks."""

    all = "all, gathered"
    best = "`best_of` them"
    own = "those of this rank's `vocabulary_parts`"


def best_of(logits: Tensor, *, first: int = 0, comm: Comm | None = None) -> Tensor:
    """The largest logit of each position and its token, (..., 2) in fp32, which holds any id.

    NaN counts as the largest, and of equal ones the first, as in `Tensor.argmax`.

    Args:
        logits: logits of the tokens (..., O) from id `first` on.
        first: see `logits`.
        comm: ranks that have the other tokens, in the order of their ids; None for a single rank.
    """
    largest, ids = logits.max(-1, keepdim=True)
    best = torch.cat([largest.float(), ids + first], dim=-1)  # which makes floats of the ids
    if comm is None or comm.size == 1:
        return best
    of_ranks = comm.all_gather_last(best, (2,) * comm.size).unflatten(-1, (comm.size, 2))
    rank = of_ranks[..., :1].argmax(-2, keepdim=True)
    found: Tensor = of_ranks.gather(-2, rank.expand(*rank.shape[:-1], 2))[..., 0, :]
    return found


# Every message asks: what calls the methods `do_...` of a group, as operators that a trace holds.
_collectives = cache(partial(operators.made, "collectives"))
# By members, made once for all points of a sweep.
_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
_boards: dict[tuple[int, ...], Board | None] = {}


def leave_groups() -> None:
    """Leave all process groups, and wait until their threads have ended.

    A thread of gloo may still hold the tensors of a collective that is over; to free them while the interpreter ends
    would abort the process.
    """
    dist.destroy_process_group()
    _groups.clear()
    gc.collect()  # a group's threads end with its last reference


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The groups of this rank.

    Attributes:
        world: all ranks.
        replica: the ranks that work on the same text as this one.
        number: number of the replica.
        layout: which rank of a replica holds what.
        target: the ranks that share the target, or its layers of a stage; None if this rank has no part of it.
        draft: the ranks that share the draft, only this one if it is replicated; None if this rank has no part of it.
        before, behind: see `ranks.stages.ModelStage`.
        all_stages: the ranks that hold the stages of a target of several; None on other ranks.
    """

    world: Comm
    replica: Comm
    number: int
    layout: Layout
    target: Comm | None
    draft: Comm | None
    before: Comm | None = None
    behind: Comm | None = None
    all_stages: Comm | None = None

    @property
    def holders(self) -> tuple[Comm | None, Comm | None]:
        """The ranks with a part of the target, and with a part of the draft; None on other ranks."""
        return self.all_stages or self.target, self.draft

    @property
    def replica_ranks(self) -> range:
        """The ranks of the world that are in this rank's replica."""
        return range(self.number * self.replica.size, (self.number + 1) * self.replica.size)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of later collectives of all groups."""
        for comm in (self.world, self.replica, self.target, self.draft, self.before, self.behind, self.all_stages):
            if comm:
                comm.set_timeout(seconds)


def build_mesh(layout: Layout, world: Comm, *, num_replicas: int = 1) -> Mesh:
    """Make the groups of a placement, checked by `settings.checks`; all ranks of the world must call this together."""
    size = world.size // num_replicas
    number, rank = divmod(world.rank, size)

    def mine(ranks: Iterable[int]) -> Comm | None:
        """This replica's group; every rank takes part in making the groups of all replicas, in the same order."""
        inside = tuple(ranks)
        groups = [world.subgroup(tuple(replica * size + rank for rank in inside)) for replica in range(num_replicas)]
        return groups[number]

    def ours(groups: Iterable[Iterable[int]]) -> list[Comm | None]:
        """This rank's groups of several, which all ranks make."""
        return [*filter(None, [mine(sorted(inside)) for inside in groups])]

    replica, targets = mine(range(size)), ours(layout.stages)
    neighbours = {number: ours(zip(*pair, strict=True)) for number, pair in enumerate(pairwise(layout.stages))}
    own = next((number for number, ranks in enumerate(layout.stages) if rank in ranks), -1)
    assert replica, "a replica has all ranks of its block"
    alone = world.alone() if rank in layout.draft_ranks else None
    draft = alone if layout.splits_batch else mine(layout.draft_ranks)
    all_stages = mine(layout.target_ranks) if layout.num_stages > 1 else None
    return Mesh(
        world=world,
        replica=replica,
        number=number,
        layout=layout,
        target=next(iter(targets), None),
        draft=draft,
        before=next(iter(neighbours.get(own - 1, ())), None),
        behind=next(iter(neighbours.get(own, ())), None),
        all_stages=all_stages,
    )
