"""Backends: ways of placing a target on its ranks, which checks, planner and loader read. The core has its own cuts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llama_ssp.registry import Registry


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
    """One way of placing a target; usually a library does it, with modules of its own."""

    name: str  # value of `placement.target.kind`.
    purpose: str  # what `--help` says of it.
    order: int = 100  # position in lists.
    # `module:function` that loads this rank's part of a target, from a `models.weights.Loading`.
    load: str
    # `module:function` that raises what `load` would, before weights are read: from the `ranks.world.World`, the
    # `settings.layout.Layout`, the target's shape and its storage format.
    check: str | None = None
    # The `Inventory` of each rank, or of each device, of a `PlannedModel` on `num_ranks`; None for the core's cuts.
    shares: Callable[..., tuple[Any, ...]] | None = None
    is_layer_wise: bool = False  # one rank has whole layers on each of its GPUs, which take turns.
    reads_whole: bool = False  # each rank reads a whole model into its host memory first.
    # what is wrong with the ranks of target and draft, beyond what is wrong for every backend.
    problems: Callable[[tuple[int, ...], tuple[int, ...]], Iterator[str]] | None = None
    notes: Callable[[Any], Iterator[str]] | None = None  # of a plan, from its `PlanSpec`.

    @property
    def by_library(self) -> bool:
        """Whether a library places the target, and Python launches its operators."""
        return self.shares is not None


TENSOR = Backend(
    name="tensor",
    purpose="tensor is tensor parallel over its ranks; heads may divide unevenly.",
    order=0,
    load="llama_ssp.models.loading:load_model",
)
BACKENDS: Registry[Backend] = Registry(setting="placement.target.kind", modules=(__name__,), kind=Backend)
register, backends, backend_of = BACKENDS.register, BACKENDS.all, BACKENDS.of
