"""Every sensible way to use a machine for a family of models, ranked by speed; what does not fit is kept, with why.

The rest of the job (batch, context, acceptance) stays as it was asked.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.config import catalogue
from llama_ssp.config.formats.format import format_of, formats
from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, ModelConfig
from llama_ssp.errors import PlacementError
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import PlanSpec, planned_model
from llama_ssp.planning.timing import timing

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to use the machine.

    Attributes:
        settings: what to add to the command line.
        ms_per_token: with the best K, or plain without a draft; None where it does not fit.
        reason: why it does not fit; None where it does.
    """

    target: str
    quantization: str
    draft: str | None
    draft_kind: str | None
    num_draft_tokens: int
    ms_per_token: float | None
    speedup: float | None
    needed_bytes: int | None
    capacity_bytes: int
    reason: str | None
    settings: tuple[str, ...]


def search(job: PlanSpec, hardware: HardwareConfig) -> list[Choice]:
    """Try everything; the fastest first, behind them what does not fit."""
    choices = [_judge(candidate, hardware) for candidate in _candidates(job, hardware)]
    return sorted(choices, key=lambda choice: (choice.ms_per_token is None, choice.ms_per_token or 0.0))


def search_document(choices: list[Choice]) -> list[dict[str, Any]]:
    """The choices, ready for JSON, numbered by rank."""
    return [{"rank": rank} | asdict(choice) for rank, choice in enumerate(choices, start=1)]


def _candidates(job: PlanSpec, hardware: HardwareConfig) -> Iterator[PlanSpec]:
    series = _series(job.target.name)
    for model in series:
        # What the catalogue holds by a quantized name is the same model, and is tried below.
        for quantization in formats():
            target = planned_model(replace(model, quantization=quantization), device=hardware.device)
            base = replace(job, target=target, draft=None, draft_ranks=(), target_ranks=_all_ranks(job, hardware))
            yield base
            for draft in _drafts(model, series):
                for kind in _layouts(job, hardware):
                    yield _with_draft(base, hardware, draft, kind)


def _series(name: str) -> list[ModelConfig]:
    """The models that share a name's prefix (`llama2_`), family and vocabulary; the model alone where it has no kin."""
    if name not in catalogue.names():
        raise PlacementError(f"search=true ranks models of the catalogue, and model={name} is not one of them")
    chosen = catalogue.load(name)
    prefix = _prefix(name)
    found = [catalogue.load(other) for other in catalogue.names() if _prefix(other) == prefix]
    return [
        other
        for other in found
        if other.shape
        and chosen.shape
        and (other.shape.model_type, other.shape.vocab_size) == (chosen.shape.model_type, chosen.shape.vocab_size)
        and not format_of(other.quantization).is_quantized
    ]


def _prefix(name: str) -> str:
    return name.removesuffix("_8bit").rpartition("_")[0]


def _drafts(model: ModelConfig, series: list[ModelConfig]) -> list[ModelConfig]:
    """Smaller models of the series, and what the entry names as its default draft."""
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
    """The ranks of one copy."""
    return tuple(range(hardware.num_ranks // job.num_replicas))


def _with_draft(base: PlanSpec, hardware: HardwareConfig, draft: ModelConfig, kind: DraftLayout) -> PlanSpec:
    ranks = _all_ranks(base, hardware)
    apart = kind is DraftLayout.own_gpu
    target_ranks = ranks[:-1] if apart else ranks
    draft_ranks = {DraftLayout.one_rank: ranks[:1], DraftLayout.own_gpu: ranks[-1:]}.get(kind, target_ranks)
    planned = planned_model(draft, device=hardware.device)
    return replace(base, target_ranks=target_ranks, draft=planned, draft_kind=kind, draft_ranks=draft_ranks)


def _judge(job: PlanSpec, hardware: HardwareConfig) -> Choice:
    try:
        ranks = memory(job, hardware)
    except PlacementError as error:
        return _choice(job, hardware, reason=str(error))
    full = min(ranks, key=lambda rank: rank.free_bytes)
    if not full.fits:
        return _choice(
            job,
            hardware,
            needed_bytes=full.needed_bytes,
            reason=f"rank {full.rank} needs {full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB",
        )
    timed = timing(job, hardware)
    by_speed = sorted((seconds, number) for number, seconds in enumerate(timed.by_num_draft_tokens, start=1))
    for token_s, num_draft_tokens in by_speed:
        drafting = replace(job, num_draft_tokens=num_draft_tokens)
        full = min(memory(drafting, hardware), key=lambda rank: rank.free_bytes)
        if full.fits:
            speedup = timed.plain_s / token_s
            ms, needed = 1e3 * token_s, full.needed_bytes
            return _choice(drafting, hardware, ms_per_token=ms, speedup=speedup, needed_bytes=needed)
    return _choice(job, hardware, ms_per_token=1e3 * timed.plain_s, speedup=1.0, needed_bytes=full.needed_bytes)


def _choice(
    job: PlanSpec,
    hardware: HardwareConfig,
    *,
    ms_per_token: float | None = None,
    speedup: float | None = None,
    needed_bytes: int | None = None,
    reason: str | None = None,
) -> Choice:
    storage, draft = format_of(job.target.quantization), job.draft
    settings = [f"model={job.target.name}", f"draft={draft.name if draft else 'none'}"]
    if storage.is_quantized:
        settings.append(f"model.quantization={storage.name}")
    if draft:
        settings += [
            f"placement.draft.kind={job.draft_kind.name}", f"speculation.num_draft_tokens={job.num_draft_tokens}",
        ]  # fmt: skip
    return Choice(
        target=job.target.name,
        quantization=storage.name if storage.is_quantized else job.target.dtype.name,
        draft=draft.name if draft else None,
        draft_kind=job.draft_kind.name if draft else None,
        num_draft_tokens=job.num_draft_tokens if draft else 0,
        ms_per_token=ms_per_token,
        speedup=speedup,
        needed_bytes=needed_bytes,
        capacity_bytes=hardware.memory_bytes,
        reason=reason,
        settings=tuple(settings),
    )
