"""Finds changes of settings that make a plan fit, judged by what the user loses.

    nothing   the draft has another place, is another one, or none: the text has the same distribution
    little    linear layers in 8 bits, fewer rows at a time
    more      linear layers in 4 bits, a shorter prompt, more GPUs or nodes, another machine
    time      layers wait in the host's memory or on disk
    model     a smaller target, if nothing else fits

At most three changes are named: those that lose least, of these the fastest, one of each kind, none that its own plan
warns against.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from llama_ssp.config import catalogue
from llama_ssp.config.formats import format_of, formats
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, Dtype, TargetKind, WholeParts
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices import advice, elsewhere
from llama_ssp.planning.choices.layouts import on_block, placement_settings
from llama_ssp.planning.choices.lengths import by_length, length_setting
from llama_ssp.planning.memory import RankMemoryPlan, fullest_rank, largest_batch, largest_context
from llama_ssp.planning.spec import PlannedModel, PlanSpec, planned_model
from llama_ssp.planning.timing import Timing, timing

MOST_CHANGES = 3
EIGHT_BITS = 3
"""Largest `StorageFormat.change_weight` of a format that loses little."""


class Loss(IntEnum):
    """What a user loses by a change, the least first."""

    nothing = 0
    little = 1
    more = 2
    time = 3
    model = 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings to add to the command line, and what the plan then says.

    Attributes:
        loss: name of a `Loss`.
        needed_bytes: of the fullest rank.
        ms_per_token: of a completion in its faster mode, while decoding.
        tokens_per_s: of all rows and replicas.
        is_tight: less than 3 % of a rank's memory is left.
    """

    settings: tuple[str, ...]
    loss: str
    needed_bytes: int
    ms_per_token: float
    tokens_per_s: float
    is_tight: bool


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A changed job, before it is known whether it fits; of each `kind` one is named."""

    kind: str
    loss: Loss
    settings: tuple[str, ...]
    job: PlanSpec
    hardware: HardwareConfig


@dataclass(frozen=True, kw_only=True)
class _Fitting:
    way: _Way
    fullest: RankMemoryPlan
    timed: Timing

    @property
    def row_s(self) -> float:
        """Seconds per token over all rows and replicas."""
        return self.timed.best_s / (self.way.job.batch_size * self.way.job.num_replicas)

    @property
    def order(self) -> tuple[int, bool, float, int]:
        return self.way.loss, self.fullest.is_tight, self.row_s, len(self.way.settings)

    @property
    def change(self) -> Change:
        return Change(
            settings=self.way.settings,
            loss=self.way.loss.name,
            needed_bytes=self.fullest.needed_bytes,
            ms_per_token=1e3 * self.timed.best_s,
            tokens_per_s=1 / self.row_s,
            is_tight=self.fullest.is_tight,
        )


def changes_that_fit(job: PlanSpec, hardware: HardwareConfig) -> list[Change]:
    """Return up to three changes that make a plan fit, the best first; empty if nothing that was tried fits."""
    candidates = _fitting(_ways(job, hardware))
    if not any(one.way.loss <= Loss.little for one in candidates):
        candidates += _fitting(_two_at_once(job, hardware))
    chosen = _chosen(candidates) or _chosen(_fitting(_smaller_targets(job, hardware)))
    return [one.change for one in chosen]


def _chosen(candidates: list[_Fitting]) -> list[_Fitting]:
    """The best of each kind whose own plan does not warn against it."""
    chosen: dict[str, _Fitting] = {}
    for candidate in sorted(candidates, key=lambda one: one.order):
        if len(chosen) == MOST_CHANGES:
            break
        if candidate.way.kind not in chosen and (accepted := _accepted(candidate)):
            chosen[candidate.way.kind] = accepted
    return sorted(chosen.values(), key=lambda one: one.order)


def _fitting(ways: Iterable[_Way]) -> list[_Fitting]:
    return [found for way in ways if (found := _tried(way))]


def _tried(way: _Way) -> _Fitting | None:
    """What its plan says; None if it does not fit or cannot be laid out."""
    try:
        fullest = fullest_rank(way.job, way.hardware)
        return _Fitting(way=way, fullest=fullest, timed=timing(way.job, way.hardware)) if fullest.fits else None
    except PlacementError:
        return None


def _accepted(candidate: _Fitting) -> _Fitting | None:
    """The candidate, or the same with the best K, if the plan of one does not warn."""
    way, timed = candidate.way, candidate.timed
    if not any(advice.warnings(way.job, way.hardware, timed)):
        return candidate
    if timed.best_num_draft_tokens is None or way.job.adapts:
        return None
    _, drafting = next(by_length(way.job, timed))
    better = _tried(replace(way, settings=(*way.settings, length_setting(drafting)), job=drafting))
    return better if better and not any(advice.warnings(better.way.job, way.hardware, better.timed)) else None


def _ways(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    yield from _drafts(job, hardware)
    yield from _sizes(job, hardware)
    for step in _formats(job, hardware):
        yield from _placed(step)
    yield from _first_with_room(_more_ranks(job, hardware))
    yield from _first_with_room(_other_machines(job, hardware))
    if use := elsewhere.offloaded(job, hardware):
        yield _Way(kind="offload", loss=Loss.time, settings=use.settings, job=use.job, hardware=hardware)


def _placed(step: _Way) -> Iterator[_Way]:
    """The step alone, with the draft in every other place, and without a draft."""
    yield step
    job = step.job
    if job.draft is None:
        return
    for other in _places(job):
        yield replace(step, settings=(*step.settings, *placement_settings(replace(other, num_replicas=1))), job=other)
    yield replace(step, settings=(*step.settings, "draft=none"), job=without_draft(job))


def _places(job: PlanSpec) -> Iterator[PlanSpec]:
    """The job with its draft elsewhere on the same ranks, or with no part of it whole on each of them."""
    if job.target_kind is TargetKind.tensor:
        yield from (other for other in on_block(job, len(job.layout.ranks)) if other.layout != job.layout)
    if job.draft_kind is DraftLayout.sharded and len(job.draft_ranks) > 1 and job.draft_whole.keeps_embedding:
        yield replace(job, draft_whole=WholeParts.none)


def without_draft(job: PlanSpec) -> PlanSpec:
    """The job without a draft, whose own ranks the target has then."""
    ranks = job.layout.ranks if job.target_kind is TargetKind.tensor else job.target_ranks
    return replace(job, draft=None, matching=None, draft_ranks=(), target_ranks=ranks)


def _drafts(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    """The draft elsewhere, smaller drafts, and none: nothing is lost but time."""
    if job.draft is None:
        return
    start = _Way(kind="draft", loss=Loss.nothing, settings=(), job=job, hardware=hardware)
    yield from (replace(way, kind=_kind_of(way)) for way in _placed(start) if way.settings)
    for name in _smaller(job.draft.name):
        other = replace(job, draft=planned_model(catalogue.load(name), device=job.device))
        yield from (way for way in _placed(replace(start, settings=(f"draft={name}",), job=other)) if way.job.draft)


def _kind_of(way: _Way) -> str:
    return "draft" if way.job.draft is None else "placement"


def _sizes(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    """Fewer rows, or a shorter prompt, with the draft in every place."""
    for way in _placed(_Way(kind="batch", loss=Loss.little, settings=(), job=job, hardware=hardware)):
        if job.batch_size > 1 and _has_room(replace(way, job=replace(way.job, batch_size=1))):
            rows = largest_batch(way.job, hardware, limit=job.batch_size)
            fewer = replace(way.job, batch_size=rows)
            if rows < job.batch_size:
                yield replace(way, settings=(f"batch_size={rows}", *way.settings), job=fewer)
        if _has_room(replace(way, job=replace(way.job, prompt_tokens=1))):
            prompt = largest_context(way.job, hardware) - job.max_new_tokens
            settings = (f"prompt_tokens={prompt}", *way.settings)
            shorter = replace(way.job, prompt_tokens=prompt)
            if prompt < job.prompt_tokens:
                yield replace(way, kind="context", loss=Loss.more, settings=settings, job=shorter)


def _formats(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    """The target in other number formats."""
    target, short = job.target, job.target.stored

    def step(setting: str, model: PlannedModel, loss: Loss) -> _Way:
        changed = replace(job, target=model)
        return _Way(kind="precision", loss=loss, settings=(setting,), job=changed, hardware=hardware)

    if job.device == "cpu" and target.dtype is Dtype.fp32 and short in {Dtype.bf16, Dtype.fp16}:
        # Slower, but halves everything that a CPU keeps in fp32 for 16-bit files.
        yield step(f"model.dtype={short.name}", replace(target, dtype=short), Loss.little)
    now = format_of(target.quantization)
    for storage in formats().values():
        if storage.change_weight is None or storage.change_weight <= (now.change_weight or 0):
            continue
        loss = Loss.little if storage.change_weight <= EIGHT_BITS else Loss.more
        yield step(f"model.quantization={storage.name}", target.quantized(storage.name), loss)


def _more_ranks(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    for more in elsewhere.more_ranks(job, hardware):
        yield _Way(kind="ranks", loss=Loss.more, settings=more.settings, job=more.job, hardware=more.hardware)


def _other_machines(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    for use in elsewhere.others(job, hardware):
        yield _Way(kind="machine", loss=Loss.more, settings=use.settings, job=use.job, hardware=use.hardware)


def _two_at_once(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    """Fewer bits and more ranks together."""
    for step in _formats(job, hardware):
        both = (replace(more, settings=(*step.settings, *more.settings)) for more in _more_ranks(step.job, hardware))
        yield from _first_with_room(both)


def _first_with_room(steps: Iterable[_Way]) -> list[_Way]:
    """The first step that fits, with the draft in every place."""
    placed = ([*_placed(step)] for step in steps)
    return next((ways for ways in placed if any(map(_has_room, ways))), [])


def _has_room(way: _Way) -> bool:
    """Whether it fits, and with something left: what is bought should not be tight."""
    try:
        fullest = fullest_rank(way.job, way.hardware)
    except PlacementError:
        return False
    return fullest.fits and not fullest.is_tight


def _smaller_targets(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Way]:
    """The largest other target that fits, with a draft that is smaller still or none."""

    def steps() -> Iterator[_Way]:
        for name in reversed(_smaller(job.target.name)):
            target = planned_model(catalogue.load(name), device=job.device)
            other = replace(job, target=replace(target, by_library=job.target.by_library))
            settings = [f"model={name}"]
            if job.draft and job.draft.name not in _smaller(name):
                other = without_draft(other)
                settings.append("draft=none")
            yield _Way(kind="target", loss=Loss.model, settings=tuple(settings), job=other, hardware=hardware)

    yield from _first_with_room(steps())


def _smaller(name: str) -> list[str]:
    """Smaller models of the same family and vocabulary, the smallest first."""
    return catalogue.smaller_relatives(catalogue.load(name)) if name in catalogue.names() else []
