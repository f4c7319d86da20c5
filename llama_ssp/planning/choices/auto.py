"""Chooses the fastest placement of a job among its `layouts`; `search` varies models, precision and K too."""

from dataclasses import dataclass

from llama_ssp.config.layout import named
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.layouts import layouts, unusual_whole
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import timing
from llama_ssp.words import rounded


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
