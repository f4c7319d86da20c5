"""Ranks all sensible ways to use a machine for a model by speed, including those that do not fit.

The asked model comes first, then the smaller ones of its series, the fastest first. Each is tried in every precision,
with every draft of its vocabulary, in the `layouts` of the machine's ranks, with the best K.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llama_ssp.config import catalogue
from llama_ssp.config.formats import format_of, formats
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, ModelConfig
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.layouts import layouts, placement_settings
from llama_ssp.planning.choices.lengths import by_length, length_setting
from llama_ssp.planning.memory import RankMemoryPlan, fits, fullest_rank
from llama_ssp.planning.spec import PlannedModel, PlanSpec, planned_model
from llama_ssp.planning.timing import Timing, timing

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to use the machine.

    Attributes:
        num_ranks, num_replicas: ranks of a replica, and the replicas that fill the machine.
        adapts: K is chosen for each round, because nobody knows which one is best.
        overlaps: drafting overlaps verification.
        ms_per_token: of a completion, for the best K, or plain without a draft.
        tokens_per_s: of all rows and replicas.
        first_token_ms: the prompt.
        is_tight: it fits with less than 3 % of a rank's memory left.
        reason: why the choice does not fit.
        settings: what to add to the command line to plan or run it.
    """

    target: str
    quantization: str
    draft: str | None
    draft_kind: str | None
    num_draft_tokens: int
    num_ranks: int
    num_replicas: int
    adapts: bool = False
    overlaps: bool = False
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    first_token_ms: float | None = None
    speedup: float | None = None
    needed_bytes: int | None = None
    capacity_bytes: int
    is_tight: bool = False
    reason: str | None = None
    settings: tuple[str, ...]


def search(job: PlanSpec, hardware: HardwareConfig) -> list[Choice]:
    """Price all candidates for a job like this one: the asked model first, the fastest first, misfits of each last."""
    choices = [_priced(candidate, hardware) for candidate in _candidates(job, hardware)]
    asked = _unquantized(job.target.name)
    fastest: dict[str, float] = {}
    for one in choices:
        fastest[one.target] = min(one.ms_per_token or math.inf, fastest.get(one.target, math.inf))
    return sorted(
        choices,
        key=lambda choice: (
            choice.target != asked, fastest[choice.target], choice.target,
            choice.ms_per_token is None, choice.ms_per_token or 0.0, choice.num_ranks,
        ),
    )  # fmt: skip


def search_document(choices: list[Choice]) -> list[dict[str, Any]]:
    """The choices for JSON, numbered by rank."""
    return [{"rank": rank} | vars(choice) for rank, choice in enumerate(choices, start=1)]


def _candidates(job: PlanSpec, hardware: HardwareConfig) -> Iterator[PlanSpec]:
    """Every model, precision, draft and layout; a layout that lacks room for the target alone is tried without drafts.

    Entries that are quantized by name are left out: they are the same models with a quantization.
    """
    known = catalogue.entries()
    for model in _series(job.target, known):
        drafts = [planned_model(draft, device=hardware.device) for draft in _drafts(model, known)]
        if job.draft and job.matching is None and _is_beyond_catalogue(job) and _is_asked(model, job):
            drafts += [job.draft] if job.draft.name not in {draft.name for draft in drafts} else []
        for quantization in formats():
            target = planned_model(replace(model, quantization=quantization), device=hardware.device)
            plain = replace(job, target=target, draft=None, matching=None, draft_ranks=(), overlap=False)
            for base in layouts(plain, num_ranks=hardware.num_ranks, divides=True, thorough=False):
                yield base
                if _has_room(base, hardware):
                    yield from _drafted(base, drafts)


def _is_beyond_catalogue(job: PlanSpec) -> bool:
    return not {model.name for model in (job.target, job.draft) if model} <= set(catalogue.names())


def _is_asked(model: ModelConfig, job: PlanSpec) -> bool:
    return model.name == _unquantized(job.target.name)


def _drafted(base: PlanSpec, drafts: list[PlannedModel]) -> Iterator[PlanSpec]:
    num_ranks = len(base.target_ranks) * base.num_replicas
    for draft in drafts:
        for job in layouts(replace(base, draft=draft), num_ranks=num_ranks, divides=False, thorough=False):
            yield job
            if job.draft_kind is DraftLayout.own_gpu:
                yield replace(job, overlap=True)


def _has_room(job: PlanSpec, hardware: HardwareConfig) -> bool:
    try:
        return fits(job, hardware)
    except PlacementError:
        return False


def _series(target: PlannedModel, known: list[ModelConfig]) -> list[ModelConfig]:
    """The model, and the smaller unquantized ones with the same name prefix (`llama2_`), family and vocabulary.

    A model that the catalogue lacks, of the hub or from a folder, is alone.
    """
    entry = next((each for each in known if each.name == target.name), None)
    if entry is None or entry.shape is None:
        return [ModelConfig(name=target.name, shape=target.shape, stored_dtype=target.stored)]
    series = {_unquantized(target.name), *catalogue.smaller_relatives(entry, known=known)}
    return [
        other for other in catalogue.relatives(entry, known=known)
        if other.name in series and _prefix(other.name) == _prefix(target.name)
    ]  # fmt: skip


def _unquantized(name: str) -> str:
    return name.removesuffix("_8bit")


def _prefix(name: str) -> str:
    return _unquantized(name).rpartition("_")[0]


def _drafts(model: ModelConfig, known: list[ModelConfig]) -> list[ModelConfig]:
    """Smaller models of the same vocabulary, and the entry's default draft; of equal sizes one, of the series first.

    A default draft of the hub has no sizes before somebody asks for it, and is left out.
    """
    names = {*catalogue.smaller_relatives(model, known=known), model.default_draft}
    found: dict[tuple[int, ...], ModelConfig] = {}
    for draft in sorted(known, key=lambda other: _prefix(other.name) != _prefix(model.name)):
        if draft.name in names and draft.shape:
            sizes = (draft.shape.num_hidden_layers, draft.shape.hidden_size, draft.shape.intermediate_size)
            found.setdefault(sizes, draft)
    return list(found.values())


def _priced(job: PlanSpec, hardware: HardwareConfig) -> Choice:
    try:
        timed = timing(job, hardware)
        for token_s, way in [*by_length(job, timed)] or [(timed.plain_s, job)]:
            full = fullest_rank(way, hardware)
            if full.fits:
                return _timed(way, hardware, full, timed, token_s=token_s)
            if not (asked := fullest_rank(job, hardware)).fits:
                full = asked
                break
    except PlacementError as error:
        return _choice(job, hardware, reason=str(error))
    reason = f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB"
    return _choice(job, hardware, needed_bytes=full.needed_bytes, reason=reason)


def _timed(job: PlanSpec, hardware: HardwareConfig, full: RankMemoryPlan, timed: Timing, *, token_s: float) -> Choice:
    return _choice(
        job, hardware,
        ms_per_token=1e3 * token_s,
        tokens_per_s=job.batch_size * job.num_replicas / token_s,
        first_token_ms=1e3 * timed.prefill_s,
        speedup=timed.plain_s / token_s,
        needed_bytes=full.needed_bytes,
        is_tight=full.is_tight,
    )  # fmt: skip


def _choice(job: PlanSpec, hardware: HardwareConfig, **figures: Any) -> Choice:  # noqa: ANN401 - fields of a choice
    storage, draft = format_of(job.target.quantization), job.draft
    settings = [f"model={job.target.name}", f"draft={draft.name if draft else 'none'}"]
    if storage.is_quantized:
        settings.append(f"model.quantization={storage.name}")
    settings += placement_settings(job)
    if draft:
        settings.append(length_setting(job))
    return Choice(
        target=job.target.name,
        quantization=storage.name if storage.is_quantized else job.target.dtype.name,
        draft=draft.name if draft else None,
        draft_kind=job.draft_kind.name if draft else None,
        num_draft_tokens=job.num_draft_tokens if draft else 0,
        adapts=bool(draft) and job.adapts,
        overlaps=job.overlaps,
        num_ranks=len(job.layout.ranks),
        num_replicas=job.num_replicas,
        capacity_bytes=hardware.rank_bytes,
        settings=tuple(settings),
        **figures,
    )
