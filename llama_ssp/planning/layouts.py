"""All ways to use the ranks of a machine for a job: `auto`, `search` and the advice of a plan choose among these.

The ranks form one block per replica, and the blocks have equal sizes. Inside a block:

    target   all ranks of the block; all but the last few, if the draft has ranks of its own
    draft    whole on the first rank; sharded; whole on every rank, for its share of the rows; on the last ranks

16 ranks are 1 replica of 16, 2 of 8 (a node each), 4 of 4, 8 of 2, or 16 of 1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from llama_ssp.errors import PlacementError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.settings.layout import named
from llama_ssp.settings.schema import ADAPTIVE, ADAPTIVE_LENGTHS, DraftLayout, DraftPlacement, WholeParts
from llama_ssp.words import rounded


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


def by_length(job: PlanSpec, timed: Timing) -> Iterator[tuple[float, PlanSpec]]:
    """Seconds per token of the job with every K, the fastest first; with K = auto alone where no K is recommended.

    Nothing without a draft.
    """
    if not timed.by_num_draft_tokens:
        return
    if job.overlaps and not timed.knows_best_k:  # which needs one K for all rounds
        yield timed.by_num_draft_tokens[job.num_draft_tokens - 1], replace(job, adapts=False)
        return
    if timed.knows_best_k:
        times = sorted((token_s, number) for number, token_s in enumerate(timed.by_num_draft_tokens, start=1))
        yield from ((token_s, replace(job, num_draft_tokens=number, adapts=False)) for token_s, number in times)
        return
    token_s = min(timed.plain_s, *(timed.by_num_draft_tokens[number - 1] for number in ADAPTIVE_LENGTHS))
    yield token_s, replace(job, num_draft_tokens=max(ADAPTIVE_LENGTHS), adapts=True)


def notes_on_guesses(adapts: Iterable[bool]) -> list[str]:
    """What a search notes if K adapts in one of its choices."""
    said = (
        "K auto: nobody has measured this pair, and its times rest on a forecast of its acceptance; the plan of a row "
        "has their range, and says how to narrow it"
    )
    return [said] if any(adapts) else []


def length_setting(job: PlanSpec) -> str:
    """The setting of a job's K."""
    return f"speculation.num_draft_tokens={ADAPTIVE if job.adapts else job.num_draft_tokens}"


@dataclass(frozen=True, kw_only=True)
class AutoPlacement:
    """The job with the chosen ranks, and a sentence that gives the reason."""

    job: PlanSpec
    sentence: str


def choose_placement(
    job: PlanSpec, hardware: HardwareConfig, *, num_ranks: int, divides: bool = False
) -> AutoPlacement:
    """Choose by the forecast time of a completion, prompt included, among the placements that fit.

    The ranks and draft kind of `job` are ignored. Each replica uses an equal block of `num_ranks`, of which `hardware`
    may have more; `divides` allows more replicas on smaller blocks. If nothing fits, the first placement that can be
    laid out is returned; its plan says what is missing. If none can be laid out, PlacementError is raised.
    """
    possible: list[PlanSpec] = []
    timed: list[tuple[float, PlanSpec]] = []
    error = None
    for candidate in layouts(job, num_ranks=num_ranks, divides=divides, thorough=True):
        try:
            if fits(candidate, hardware):
                forecast = timing(candidate, hardware)
                timed.append((forecast.speculative_run_s or forecast.plain_run_s, candidate))
            possible.append(candidate)
        except PlacementError as found:
            error = error or found
    if error and not possible:
        raise error
    if not timed:
        sentence = f"placement=auto: none fits, this plan has {_described(possible[0])}"
        return AutoPlacement(job=possible[0], sentence=sentence)
    (run_s, chosen), *others = sorted(timed, key=lambda pair: pair[0])
    compared = ", the only one that fits"
    if others:
        second_s, second = others[0]
        compared = f"; the second of {len(timed)} that fit is {_described(second)} at {rounded(1e3 * second_s)}"
    sentence = f"placement=auto: {_described(chosen)}, forecast at {rounded(1e3 * run_s)} ms per token{compared}"
    return AutoPlacement(job=chosen, sentence=sentence)


def _described(job: PlanSpec) -> str:
    copies = f"{job.num_replicas} replicas, each with " if job.num_replicas > 1 else ""
    target = f"{copies}the target on {named(job.target_ranks)}"
    if not job.draft:
        return target
    whole = f", {each.name} whole" if (each := unusual_whole(job)) else ""
    kind = "" if job.draft_kind is DraftLayout.one_rank else f" ({job.draft_kind.name}{whole})"
    return f"{target} and the draft on {named(job.draft_ranks)}{kind}"
