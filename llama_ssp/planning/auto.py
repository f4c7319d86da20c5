"""Chooses the fastest placement of one job on one machine, among those that use all ranks of a replica.

Models, precision, K and the number of replicas stay as requested; `search` varies those.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.layout import named
from llama_ssp.config.schema import DraftLayout
from llama_ssp.errors import PlacementError
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import timing


@dataclass(frozen=True, kw_only=True)
class AutoPlacement:
    """The job with the chosen ranks, and a sentence that gives the reason."""

    job: PlanSpec
    sentence: str


def choose_placement(job: PlanSpec, hardware: HardwareConfig, *, num_ranks: int) -> AutoPlacement:
    """Choose by the forecast time of a completion, prompt included, among the placements that fit.

    The ranks and draft kind of `job` are ignored. Each replica uses an equal block of `num_ranks`, of which `hardware`
    may have more. If nothing fits, the first placement that can be laid out is returned; its plan says what is missing.
    If none can be laid out, PlacementError is raised.
    """
    possible: list[PlanSpec] = []
    timed: list[tuple[float, PlanSpec]] = []
    error = None
    for candidate in _candidates(job, num_ranks // job.num_replicas):
        try:
            if fits(candidate, hardware):
                timed.append((_run_s(candidate, hardware), candidate))
            possible.append(candidate)
        except PlacementError as found:
            error = error or found
    if not timed:
        if not possible:
            assert error, "there is always one candidate"
            raise error
        sentence = f"placement=auto: none fits, this plan has {_described(possible[0])}"
        return AutoPlacement(job=possible[0], sentence=sentence)
    timed.sort(key=lambda pair: pair[0])
    sentence = f"placement=auto: {_described(timed[0][1])}, forecast at {1e3 * timed[0][0]:.3g} ms per token"
    if len(timed) > 1:
        sentence += f"; the second of {len(timed)} that fit is {_described(timed[1][1])} at {1e3 * timed[1][0]:.3g}"
    else:
        sentence += ", the only one that fits"
    return AutoPlacement(job=timed[0][1], sentence=sentence)


def _candidates(job: PlanSpec, num_ranks: int) -> Iterator[PlanSpec]:
    ranks = tuple(range(num_ranks))
    if job.draft is None:
        yield replace(job, target_ranks=ranks, draft_ranks=())
        return
    yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.one_rank, draft_ranks=ranks[:1])
    for size in range(2, num_ranks + 1):
        yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.sharded, draft_ranks=ranks[:size])
    if num_ranks > 1 and job.batch_size > 1:
        yield replace(job, target_ranks=ranks, draft_kind=DraftLayout.replicated, draft_ranks=ranks)
    for size in range(1, num_ranks):
        yield replace(job, target_ranks=ranks[:-size], draft_kind=DraftLayout.own_gpu, draft_ranks=ranks[-size:])


def _run_s(job: PlanSpec, hardware: HardwareConfig) -> float:
    """Forecast seconds per token of a completion, speculative if there is a draft."""
    forecast = timing(job, hardware)
    return forecast.plain_run_s if forecast.speculative_run_s is None else forecast.speculative_run_s


def _described(job: PlanSpec) -> str:
    target = f"the target on {named(job.target_ranks)}"
    if not job.draft:
        return target
    kind = "" if job.draft_kind is DraftLayout.one_rank else f" ({job.draft_kind.name})"
    return f"{target} and the draft on {named(job.draft_ranks)}{kind}"
