"""Chooses the fastest placement of a job on all ranks of its replicas; `search` varies models, precision and K too."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.layout import named
from llama_ssp.config.schema import DraftLayout, DraftPlacement, WholeParts
from llama_ssp.errors import PlacementError
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import timing

DEFAULT_WHOLE = DraftPlacement().whole


@dataclass(frozen=True, kw_only=True)
class AutoPlacement:
    """The job with the chosen ranks, and a sentence that gives the reason."""

    job: PlanSpec
    sentence: str


def choose_placement(job: PlanSpec, hardware: HardwareConfig, *, num_ranks: int) -> AutoPlacement:
    """Choose by the forecast time of a completion, prompt included, among the placements that fit.

    The ranks of `job` and its draft placement are ignored. Each replica uses an equal block of `num_ranks`, of which
    `hardware` may have more. If nothing fits, the first placement that can be laid out is returned; its plan says what
    is missing. If none can be laid out, PlacementError is raised.
    """
    possible: list[PlanSpec] = []
    timed: list[tuple[float, PlanSpec]] = []
    error = None
    for candidate in _candidates(job, num_ranks // job.num_replicas):
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
        compared = f"; the second of {len(timed)} that fit is {_described(second)} at {1e3 * second_s:.3g}"
    sentence = f"placement=auto: {_described(chosen)}, forecast at {1e3 * run_s:.3g} ms per token{compared}"
    return AutoPlacement(job=chosen, sentence=sentence)


def _candidates(job: PlanSpec, num_ranks: int) -> Iterator[PlanSpec]:
    ranks, job = tuple(range(num_ranks)), replace(job, draft_whole=DEFAULT_WHOLE)
    if job.draft is None:
        yield replace(job, target_ranks=ranks, draft_ranks=())
        return
    yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.one_rank, draft_ranks=ranks[:1])
    for size in range(2, num_ranks + 1):
        sharded = replace(job, target_ranks=ranks, draft_kind=DraftLayout.sharded, draft_ranks=ranks[:size])
        for whole in (DEFAULT_WHOLE, *(each for each in WholeParts if each is not DEFAULT_WHOLE)):
            yield replace(sharded, draft_whole=whole)
    if num_ranks > 1 and job.batch_size > 1:
        yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.replicated, draft_ranks=ranks)
    for size in range(1, num_ranks):
        yield replace(job, target_ranks=ranks[:-size], draft_kind=DraftLayout.own_gpu, draft_ranks=ranks[-size:])


def _described(job: PlanSpec) -> str:
    target = f"the target on {named(job.target_ranks)}"
    if not job.draft:
        return target
    whole = "" if job.draft_whole is DEFAULT_WHOLE else f", {job.draft_whole.name} whole"
    kind = "" if job.draft_kind is DraftLayout.one_rank else f" ({job.draft_kind.name}{whole})"
    return f"{target} and the draft on {named(job.draft_ranks)}{kind}"
