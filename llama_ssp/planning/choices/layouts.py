"""All ways to use the ranks of a machine for a job: `auto`, `search` and the advice of a plan choose among these.

The ranks form one block per replica, and the blocks have equal sizes. Inside a block:

    target   all ranks of the block; all but the last few, if the draft has ranks of its own
    draft    whole on the first rank; sharded; whole on every rank, for its share of the rows; on the last ranks

16 ranks are 1 replica of 16, 2 of 8 (a node each), 4 of 4, 8 of 2, or 16 of 1.
"""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.config.schema import DraftLayout, DraftPlacement, WholeParts
from llama_ssp.planning.spec import PlanSpec


def layouts(job: PlanSpec, *, num_ranks: int, divides: bool, thorough: bool) -> Iterator[PlanSpec]:
    """The job in every layout of `num_ranks`; its own ranks and draft kind are ignored.

    It keeps its number of replicas, the most ranks each; `divides` also allows more replicas of fewer ranks. A draft
    has one rank or all; if `thorough` also every number between, and its ranks hold each of `WholeParts` whole.
    """
    most = num_ranks // job.num_replicas
    for size in block_sizes(most) if divides else [most]:
        yield from on_block(replace(job, num_replicas=num_ranks // size), size, thorough=thorough)


def block_sizes(most: int) -> list[int]:
    """The sizes of equal blocks that `most` ranks can be divided into, the largest first."""
    return [size for size in range(most, 0, -1) if most % size == 0]


def on_block(job: PlanSpec, size: int, *, thorough: bool = False) -> Iterator[PlanSpec]:
    """The job with all layouts of a replica of `size` ranks."""
    ranks = tuple(range(size))
    if job.draft is None:
        yield replace(job, target_ranks=ranks, draft_ranks=())
        return
    yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.one_rank, draft_ranks=ranks[:1])
    if size == 1:
        return
    for num_ranks in range(2, size + 1) if thorough else [size]:
        sharded = replace(job, target_ranks=ranks, draft_kind=DraftLayout.sharded, draft_ranks=ranks[:num_ranks])
        yield sharded
        if thorough:
            yield from (replace(sharded, draft_whole=each) for each in WholeParts if each is not job.draft_whole)
    if job.batch_size > 1:
        yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.replicated, draft_ranks=ranks)
    for num_ranks in range(1, size) if thorough else [1]:
        apart = ranks[-num_ranks:]
        yield replace(job, target_ranks=ranks[:-num_ranks], draft_kind=DraftLayout.own_gpu, draft_ranks=apart)


def same_kind(job: PlanSpec, size: int) -> PlanSpec | None:
    """The job on a block of another size, its draft placed as before; None if such a block has no such place."""
    kinds = {DraftLayout.one_rank} if size == 1 else {job.draft_kind}
    return next((found for found in on_block(job, size) if not job.draft or found.draft_kind in kinds), None)


def placement_settings(job: PlanSpec) -> list[str]:
    """The settings that place a job like this one, for `llama-ssp plan` and `run` alike."""
    settings = [] if job.num_replicas == 1 else [f"placement.num_replicas={job.num_replicas}"]
    if job.draft is None:
        return settings
    settings.append(f"placement.draft.kind={job.draft_kind.name}")
    if job.overlaps:
        settings.append("speculation.overlap=true")
    num_default = {DraftLayout.one_rank: 1, DraftLayout.own_gpu: 1}.get(job.draft_kind, len(job.target_ranks))
    if len(job.draft_ranks) != num_default:
        settings.append(f"placement.draft.tp_size={len(job.draft_ranks)}")
    if whole := unusual_whole(job):
        settings.append(f"placement.draft.whole={whole.name}")
    return settings


def unusual_whole(job: PlanSpec) -> WholeParts | None:
    """What the ranks that share a draft hold whole; None by default, and where no ranks share it."""
    is_shared = job.draft is not None and job.draft_kind is not DraftLayout.replicated and len(job.draft_ranks) > 1
    return job.draft_whole if is_shared and job.draft_whole is not DraftPlacement().whole else None
