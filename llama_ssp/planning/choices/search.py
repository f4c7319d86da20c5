"""Ranks all sensible ways to use a machine for a series of models by speed, including those that do not fit."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.config import catalogue
from llama_ssp.config.formats.format import format_of, formats
from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, DraftPlacement, ModelConfig, WholeParts
from llama_ssp.errors import PlacementError
from llama_ssp.planning.memory import RankMemoryPlan, memory
from llama_ssp.planning.spec import PlanSpec, planned_model
from llama_ssp.planning.timing import timing

GIB = 2**30
_WHOLE = DraftPlacement().whole


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to use the machine.

    `ms_per_token` is for the best K, or plain without a draft. `draft_whole` is what each of several ranks that share
    the draft holds whole. `reason` says why the choice does not fit.
    """

    target: str
    quantization: str
    draft: str | None
    draft_kind: str | None
    draft_whole: str | None
    num_draft_tokens: int
    ms_per_token: float | None = None
    speedup: float | None = None
    needed_bytes: int | None = None
    capacity_bytes: int
    reason: str | None = None
    settings: tuple[str, ...]


def search(job: PlanSpec, hardware: HardwareConfig) -> list[Choice]:
    """Price all candidates for a job like this one; the fastest first, those that do not fit last."""
    choices = [_priced(candidate, hardware) for candidate in _candidates(job, hardware)]
    return sorted(choices, key=lambda choice: (choice.ms_per_token is None, choice.ms_per_token or 0.0))


def search_document(choices: list[Choice]) -> list[dict[str, Any]]:
    """The choices for JSON, numbered by rank."""
    return [{"rank": rank} | asdict(choice) for rank, choice in enumerate(choices, start=1)]


def _candidates(job: PlanSpec, hardware: HardwareConfig) -> Iterator[PlanSpec]:
    series = _series(job.target.name)
    for model in series:
        # Entries that are quantized by name are left out: they are the same models with a quantization.
        for quantization in formats():
            target = planned_model(replace(model, quantization=quantization), device=hardware.device)
            base = replace(
                job, target=target, draft=None, matching=None, draft_ranks=(), target_ranks=_all_ranks(job, hardware)
            )
            yield base
            for draft in _drafts(model, series):
                for kind in _layouts(job, hardware):
                    drafting = _with_draft(base, hardware, draft, kind)
                    yield drafting
                    if kind is DraftLayout.sharded:
                        yield replace(drafting, draft_whole=WholeParts.attention)


def _series(name: str) -> list[ModelConfig]:
    """The unquantized models with the same name prefix (`llama2_`), family and vocabulary."""
    if name not in catalogue.names():
        raise PlacementError(f"search=true ranks models of the catalogue, and model={name} is not one of them")
    prefix = _prefix(name)
    return [other for other in catalogue.relatives(catalogue.load(name)) if _prefix(other.name) == prefix]


def _prefix(name: str) -> str:
    return name.removesuffix("_8bit").rpartition("_")[0]


def _drafts(model: ModelConfig, series: list[ModelConfig]) -> list[ModelConfig]:
    """Smaller models of the series, and the entry's default draft."""
    smaller = set(catalogue.smaller_relatives(model))
    names = [other.name for other in series if other.name in smaller]
    if model.default_draft and model.default_draft not in names:
        names.append(model.default_draft)
    return [catalogue.load(name) for name in names]


def _layouts(job: PlanSpec, hardware: HardwareConfig) -> list[DraftLayout]:
    if len(_all_ranks(job, hardware)) == 1:
        return [DraftLayout.one_rank]
    several = [DraftLayout.replicated] if job.batch_size > 1 else []
    return [DraftLayout.sharded, DraftLayout.one_rank, DraftLayout.own_gpu, *several]


def _all_ranks(job: PlanSpec, hardware: HardwareConfig) -> tuple[int, ...]:
    """The ranks of one replica."""
    return tuple(range(hardware.num_ranks // job.num_replicas))


def _with_draft(base: PlanSpec, hardware: HardwareConfig, draft: ModelConfig, kind: DraftLayout) -> PlanSpec:
    ranks = _all_ranks(base, hardware)
    apart = kind is DraftLayout.own_gpu
    target_ranks = ranks[:-1] if apart else ranks
    draft_ranks = {DraftLayout.one_rank: ranks[:1], DraftLayout.own_gpu: ranks[-1:]}.get(kind, target_ranks)
    planned = planned_model(draft, device=hardware.device)
    return replace(
        base, target_ranks=target_ranks, draft=planned, draft_kind=kind, draft_ranks=draft_ranks, draft_whole=_WHOLE
    )


def _priced(job: PlanSpec, hardware: HardwareConfig) -> Choice:
    choice = _choice(job, hardware)
    try:
        full = _fullest(job, hardware)
    except PlacementError as error:
        return replace(choice, reason=str(error))
    choice = replace(choice, needed_bytes=full.needed_bytes)
    if not full.fits:
        reason = f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB"
        return replace(choice, reason=reason)
    timed = timing(job, hardware)
    by_speed = sorted((seconds, number) for number, seconds in enumerate(timed.by_num_draft_tokens, start=1))
    for token_s, num_draft_tokens in by_speed:
        drafting = replace(job, num_draft_tokens=num_draft_tokens, adapts=False)
        if (full := _fullest(drafting, hardware)).fits:
            choice, speedup = _choice(drafting, hardware), timed.plain_s / token_s
            return replace(choice, ms_per_token=1e3 * token_s, speedup=speedup, needed_bytes=full.needed_bytes)
    return replace(choice, ms_per_token=1e3 * timed.plain_s, speedup=1.0)


def _fullest(job: PlanSpec, hardware: HardwareConfig) -> RankMemoryPlan:
    return min(memory(job, hardware), key=lambda rank: rank.free_bytes)


def _choice(job: PlanSpec, hardware: HardwareConfig) -> Choice:
    storage, draft = format_of(job.target.quantization), job.draft
    settings = [f"model={job.target.name}", f"draft={draft.name if draft else 'none'}"]
    if storage.is_quantized:
        settings.append(f"model.quantization={storage.name}")
    if draft:
        settings += [
            f"placement.draft.kind={job.draft_kind.name}", f"speculation.num_draft_tokens={job.num_draft_tokens}",
        ]  # fmt: skip
        settings += [f"placement.draft.whole={job.draft_whole.name}"] if job.draft_whole is not _WHOLE else []
    return Choice(
        target=job.target.name,
        quantization=storage.name if storage.is_quantized else job.target.dtype.name,
        draft=draft.name if draft else None,
        draft_kind=job.draft_kind.name if draft else None,
        draft_whole=job.draft_whole.name if draft else None,
        num_draft_tokens=job.num_draft_tokens if draft else 0,
        capacity_bytes=hardware.memory_bytes,
        settings=tuple(settings),
    )
