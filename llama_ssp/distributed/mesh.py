"""Which of the world's ranks work on the same text, and this rank's part among them.

Follows from the placement alone: `config.layout` says who holds what inside one copy of target and draft, and copies
sit on equal blocks of the world's ranks. A group is made once and kept, since making one costs every rank a meeting.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from llama_ssp.config.layout import Layout
from llama_ssp.distributed.comms import Comm


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's part in the run.

    Attributes:
        world: all ranks.
        replica: the ranks that work on the same text as this one.
        number: which copy that is.
        layout: which rank of a copy holds what.
        target: the ranks that share the target; None where this rank holds nothing of it.
        draft: the ranks that share the draft, this one alone where it is replicated; None where it holds nothing of it.
    """

    world: Comm
    replica: Comm
    number: int
    layout: Layout
    target: Comm | None
    draft: Comm | None

    def set_timeout(self, seconds: float) -> None:
        """Let later collectives of all groups give up after `seconds`."""
        for comm in (self.world, self.replica, self.target, self.draft):
            if comm:
                comm.set_timeout(seconds)


def build_mesh(layout: Layout, world: Comm, *, num_replicas: int = 1) -> Mesh:
    """Lay a placement out over the ranks of the world; all of them must call this together.

    Args:
        layout: of one copy; `config.checks` has seen to it that it is possible.
        world: all ranks.
        num_replicas: how many copies share them.
    """
    size = world.size // num_replicas
    number, rank = divmod(world.rank, size)

    def mine(ranks: Iterable[int]) -> Comm | None:
        """This rank's end of such a group; every rank takes part in making every copy's, in the same order."""
        inside = tuple(ranks)
        ends = [world.subgroup(tuple(copy * size + rank for rank in inside)) for copy in range(num_replicas)]
        return ends[number]

    replica, target = mine(range(size)), mine(layout.target_ranks)
    assert replica, "a replica has all ranks of its block"
    alone = Comm.single() if rank in layout.draft_ranks else None
    draft = alone if layout.splits_batch else mine(layout.draft_ranks)
    return Mesh(world=world, replica=replica, number=number, layout=layout, target=target, draft=draft)
