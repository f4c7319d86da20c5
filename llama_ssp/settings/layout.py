"""Resolves a placement, for planner, checks and engine alike.

Ranks are numbered from 0 within one replica of target and draft.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from llama_ssp.settings.backends import BACKENDS, Backend, backend_of
from llama_ssp.settings.schema import DraftLayout, DraftPlacement, PlacementConfig, TargetPlacement


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks of one replica that hold target and draft, or a slice of them, in increasing order.

    The target's ranks are divided into `num_stages` equal parts, each with consecutive layers.
    """

    target_ranks: tuple[int, ...]
    draft_ranks: tuple[int, ...]
    draft_kind: DraftLayout
    num_stages: int = 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold something."""
        return tuple(sorted({*self.target_ranks, *self.draft_ranks}))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, which share its layers; the last stage, with the logits, is on the first ranks."""
        ranks, size = self.target_ranks, max(len(self.target_ranks) // self.num_stages, 1)
        last, *before = [ranks[number * size : (number + 1) * size] for number in range(self.num_stages)]
        return *before, last

    @property
    def scoring_ranks(self) -> tuple[int, ...]:
        """The ranks that have the target's logits: its last stage."""
        return self.stages[-1]

    @cached_property
    def draft_source_rank(self) -> int:
        """The rank that sends the drafted ids: the first that has the target's logits too, else the draft's first."""
        return next((rank for rank in self.draft_ranks if rank in self.scoring_ranks), self.draft_ranks[0])

    @cached_property
    def is_apart(self) -> bool:
        """Whether there is a draft on ranks that do not have the target's logits."""
        return bool(self.draft_ranks) and self.draft_source_rank not in self.scoring_ranks

    @cached_property
    def verify_rank(self) -> int:
        """The rank that runs the rule. It has the target's logits, and if possible the draft's probabilities too."""
        return self.draft_source_rank if self.draft_ranks and not self.is_apart else self.scoring_ranks[0]

    @cached_property
    def splits_batch(self) -> bool:
        """Whether each rank of the draft drafts and verifies its own share of the rows."""
        return self.draft_kind is DraftLayout.replicated and len(self.draft_ranks) > 1

    def __str__(self) -> str:
        """Summary for log files."""
        draft = f"draft on {named(self.draft_ranks)} ({self.draft_kind.name})" if self.draft_ranks else "no draft"
        return f"target on {' and '.join(map(named, self.stages))}, {draft}"


def lay_out(placement: PlacementConfig, *, world_size: int, has_draft: bool) -> Layout:
    """Resolve the ranks of each replica of a run on `world_size`; without a draft model, its placement is ignored."""
    target, draft = placement.target, placement.draft
    apart = has_draft and draft.kind is DraftLayout.own_gpu
    everyone = range(world_size // placement.num_replicas)
    draft_ranks = sorted(draft.ranks or ())
    if apart and not draft_ranks:
        free = [rank for rank in everyone if rank not in (target.ranks or ())]
        draft_ranks = free[-(draft.tp_size or 1) :]
    left = [rank for rank in everyone if not (apart and rank in draft_ranks)]
    most = 1 if backend_of(target.kind).is_layer_wise else target.tp_size and target.tp_size * target.stages
    target_ranks = sorted(target.ranks or left[:most])
    num_stages = max(target.stages, 1)  # `checks` names others
    layout = Layout(target_ranks=tuple(target_ranks), draft_ranks=(), draft_kind=draft.kind, num_stages=num_stages)
    if has_draft and not apart and not draft_ranks:
        near = layout.scoring_ranks
        size = 1 if draft.kind is DraftLayout.one_rank else draft.tp_size or len(near)
        draft_ranks = sorted([*near, *(rank for rank in target_ranks if rank not in near)][:size])
    return replace(layout, draft_ranks=tuple(draft_ranks if has_draft else ()))


def problems_of(
    placement: PlacementConfig, *, world_size: int, has_draft: bool, chooser: str | None = None
) -> Iterator[str]:
    """Yield what is impossible in a placement on `world_size` ranks.

    `chooser` names a setting that chooses another placement.
    """
    target, draft, num_replicas = placement.target, placement.draft, placement.num_replicas
    backend = BACKENDS.find(target.kind)
    if backend is None:  # `checks` names it
        return
    if backend.by_library and (placement.auto or chooser):
        yield (
            f"{chooser or 'placement.auto=true'} chooses among targets of placement.target.kind=tensor, and "
            f"{target.kind} was given: remove one of the two"
        )
    if num_replicas < 1 or world_size % num_replicas:
        divisors = " or ".join(str(number) for number in range(1, world_size + 1) if world_size % number == 0)
        yield f"placement.num_replicas={num_replicas} must share {world_size} ranks out evenly: use {divisors}"
        return
    num_ranks = world_size // num_replicas
    if target.stages < 1:  # `checks` names it
        return
    faults = [*_faults("target", target, num_ranks, num_stages=target.stages)]
    if not faults:
        faults += _faults_of_stages(placement, world_size=world_size, has_draft=has_draft)
    if backend.by_library:
        faults += _faults_of_library(backend, target, num_replicas)
    if has_draft:
        faults += [*_faults("draft", draft, num_ranks), *_faults_of_kind(draft, num_ranks)]
    yield from faults
    if not faults and has_draft:
        layout = lay_out(placement, world_size=world_size, has_draft=True)
        yield from _clashes(layout)
        yield from backend.problems(layout.target_ranks, layout.draft_ranks) if backend.problems else ()


def _faults(
    part: str, given: TargetPlacement | DraftPlacement, num_ranks: int, *, num_stages: int = 1
) -> Iterator[str]:
    ranks, size, of_stages = given.ranks, given.tp_size, f" over {num_stages} stages" if num_stages > 1 else ""
    if ranks is not None and (not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(num_ranks))):
        yield f"placement.{part}.ranks={ranks} must name different ranks between 0 and {num_ranks - 1}"
    elif size is not None and not 1 <= size <= num_ranks // num_stages:
        yield f"placement.{part}.tp_size={size} must be between 1 and the number of ranks, here {num_ranks}{of_stages}"
    elif ranks is not None and size is not None and size * num_stages != len(ranks):
        yield f"placement.{part}.tp_size={size} and placement.{part}.ranks={ranks} contradict each other: give one"


def _faults_of_stages(placement: PlacementConfig, *, world_size: int, has_draft: bool) -> Iterator[str]:
    """Yield why the stages of a target cannot have as many ranks each."""
    target = placement.target
    whole = replace(target, stages=1, tp_size=target.tp_size and target.tp_size * target.stages)
    laid_out = lay_out(replace(placement, target=whole), world_size=world_size, has_draft=has_draft)
    number = len(laid_out.target_ranks)
    if number % target.stages or (target.stages > 1 and not number):
        divisors = " or ".join(str(size) for size in range(1, number + 1) if number % size == 0)
        yield (
            f"placement.target.stages={target.stages} must share the target's {named(laid_out.target_ranks)} out "
            f"evenly: use {divisors or 1} stages, or name other ranks in placement.target.ranks"
        )


def _faults_of_library(backend: Backend, target: TargetPlacement, num_replicas: int) -> Iterator[str]:
    """Problems with a target that a library places."""
    kind, ranks, size, is_layer_wise = backend.name, target.ranks, target.tp_size, backend.is_layer_wise
    if is_layer_wise and (len(ranks or [0]) > 1 or (size or 1) > 1):
        yield (
            f"placement.target.kind={kind} has one rank, which spreads the layers over all GPUs that no other rank "
            f"has, and {f'ranks={ranks}' if ranks else f'tp_size={size}'} was given: leave it out, or use kind=tensor"
        )
    if num_replicas > 1:
        taken = "all free GPUs of a node" if is_layer_wise else "all ranks"
        yield (
            f"placement.target.kind={kind} takes {taken} for one replica: use placement.num_replicas=1, or "
            "placement.target.kind=tensor"
        )


def _faults_of_kind(draft: DraftPlacement, num_ranks: int) -> Iterator[str]:
    kind, ranks, size = draft.kind, draft.ranks, draft.tp_size
    if kind is DraftLayout.one_rank and len(ranks or ()) > 1:
        yield (
            f"placement.draft.ranks={ranks} must be one rank, for example placement.draft.ranks=[0]: several need "
            "placement.draft.kind=sharded, replicated or own_gpu"
        )
    if kind is DraftLayout.one_rank and (size or 1) > 1:
        yield f"placement.draft.tp_size={size} must be 1 on one rank: more need placement.draft.kind=sharded or own_gpu"
    if kind is DraftLayout.replicated and size is not None:
        yield (
            f"placement.draft.tp_size={size} has no effect on a replicated draft, which is whole on each of its ranks: "
            "leave it out"
        )
    if kind is DraftLayout.own_gpu and num_ranks == 1:
        yield "placement.draft.kind=own_gpu needs a GPU in addition to the target's, and each replica has one rank"


def _clashes(layout: Layout) -> Iterator[str]:
    """Conflicts between the ranks of the two models."""
    both, scoring = {*layout.target_ranks} & {*layout.draft_ranks}, layout.scoring_ranks
    of_target, of_draft = named(layout.target_ranks), named(layout.draft_ranks)
    if layout.draft_kind is DraftLayout.own_gpu and (both or not layout.target_ranks or not layout.draft_ranks):
        yield (
            f"placement.draft.kind=own_gpu needs ranks apart from the target's, and the target is on {of_target}, "
            f"the draft on {of_draft}"
        )
    if layout.draft_kind is DraftLayout.replicated and not {*layout.draft_ranks} <= {*scoring}:
        last = "the target" if layout.num_stages == 1 else "the target's last stage"
        yield (
            f"a replicated draft drafts and verifies rows on ranks of {last}, and placement.draft.ranks="
            f"{list(layout.draft_ranks)} are not all among {named(scoring)}"
        )


def idle(layout: Layout, *, num_ranks: int) -> str | None:
    """An error sentence if some ranks would hold nothing, else None."""
    ranks = [rank for rank in range(num_ranks) if rank not in layout.ranks]
    if not ranks:
        return None
    draft = f", the draft on {named(layout.draft_ranks)}" if layout.draft_ranks else ""
    return (
        f"{named(ranks)} would hold nothing: the target is on {named(layout.target_ranks)}{draft}; name them in "
        f"placement.target.ranks{' or placement.draft.ranks' if draft else ''}, or start fewer ranks"
    )


def named(ranks: tuple[int, ...] | list[int]) -> str:
    """Ranks in words, for a sentence."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' '.join(map(str, ranks)) or '(none)'}"
