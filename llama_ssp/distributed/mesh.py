"""Which ranks hold the target, which the draft, and which one decides.

Follows from the placement alone. The target is tensor parallel over all ranks and the draft sits on one of them; that
rank sees the target's logits and the draft's probabilities, so it runs the rule and the others take its word.
"""

from dataclasses import dataclass

from llama_ssp.config.schema import PlacementConfig
from llama_ssp.distributed.comms import Comm


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's part in the run.

    Attributes:
        world: all ranks.
        target: the ranks that hold the target's slices.
        decider: world rank that runs the rule, whose word all ranks take.
        has_draft: whether this rank holds the draft model.
    """

    world: Comm
    target: Comm
    decider: int
    has_draft: bool

    @property
    def decides(self) -> bool:
        """Whether this rank runs the rule."""
        return self.world.rank == self.decider


def build_mesh(placement: PlacementConfig, world: Comm) -> Mesh:
    """Lay the placement out over the ranks of the world; `config.checks` has seen to it that it is possible."""
    draft_rank = placement.draft.ranks[0] if placement.draft.ranks else 0
    return Mesh(world=world, target=world, decider=draft_rank, has_draft=world.rank == draft_rank)
