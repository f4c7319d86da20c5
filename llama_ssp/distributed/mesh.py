"""Divides the world into replicas, and each replica into the groups that share the target and the draft.

`config.layout` decides which rank of a replica holds what; replicas occupy equal blocks of the world's ranks. Groups
are made once and kept, because all ranks must take part in making one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from llama_ssp.config.layout import Layout
from llama_ssp.distributed.comms import Comm


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The groups of this rank.

    Attributes:
        world: all ranks.
        replica: the ranks that work on the same text as this one.
        number: of the replica.
        layout: which rank of a replica holds what.
        target: the ranks that share the target; None if this rank has no part of it.
        draft: the ranks that share the draft, only this one if it is replicated; None if this rank has no part of it.
    """

    world: Comm
    replica: Comm
    number: int
    layout: Layout
    target: Comm | None
    draft: Comm | None

    @property
    def replica_ranks(self) -> range:
        """The ranks of the world that are in this rank's replica."""
        return range(self.number * self.replica.size, (self.number + 1) * self.replica.size)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of later collectives of all groups."""
        for comm in (self.world, self.replica, self.target, self.draft):
            if comm:
                comm.set_timeout(seconds)


def build_mesh(layout: Layout, world: Comm, *, num_replicas: int = 1) -> Mesh:
    """Make the groups of a placement, checked by `config.checks`; all ranks of the world must call this together."""
    size = world.size // num_replicas
    number, rank = divmod(world.rank, size)

    def mine(ranks: Iterable[int]) -> Comm | None:
        """This replica's group; every rank takes part in making the groups of all replicas, in the same order."""
        inside = tuple(ranks)
        groups = [world.subgroup(tuple(replica * size + rank for rank in inside)) for replica in range(num_replicas)]
        return groups[number]

    replica, target = mine(range(size)), mine(layout.target_ranks)
    assert replica, "a replica has all ranks of its block"
    alone = world.alone() if rank in layout.draft_ranks else None
    draft = alone if layout.splits_batch else mine(layout.draft_ranks)
    return Mesh(world=world, replica=replica, number=number, layout=layout, target=target, draft=draft)
