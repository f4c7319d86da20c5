"""Makes a plan (memory, time and advice for one job on one machine), and the document for JSON, table and figure.

docs/reference/plan-document.md describes its fields; `plan_version` changes when a field is renamed or removed.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.architectures.family import inventory
from llama_ssp.errors import CapacityError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning import advice
from llama_ssp.planning.acceptance import remarks
from llama_ssp.planning.advice import Change, changes_that_fit, faster_on_fewer
from llama_ssp.planning.memory import (
    RankMemoryPlan,
    kv_bytes_per_token,
    largest_batch,
    largest_context,
    memory,
    model_bytes,
)
from llama_ssp.planning.spec import PlannedModel, PlanSpec, notes_on_contexts, notes_on_families, notes_on_storage
from llama_ssp.planning.timing import ForwardTime, Timing, round_messages, timing, unmeasured
from llama_ssp.words import rounded, said

PLAN_VERSION = 5
GIB = 2**30
_SECONDS_PER_HOUR, _MILLION = 3600, 10**6
_FINDINGS = "docs/findings/gpus.md"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Forecast of one job on one machine.

    Attributes:
        largest_batch: the largest batch that fits at this context; 0 if none does.
        largest_context: the longest row that fits at this batch size.
        warnings, notes: see `advice`.
        changes: up to three changes that would make it fit, the best first; empty if it fits.
    """

    job: PlanSpec
    hardware: HardwareConfig
    ranks: tuple[RankMemoryPlan, ...]
    timing: Timing
    largest_batch: int
    largest_context: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(rank.fits for rank in self.ranks)

    @property
    def fullest(self) -> RankMemoryPlan:
        """The rank with the least free memory."""
        return min(self.ranks, key=lambda rank: rank.free_bytes)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The price of new tokens in the faster mode, with the time of their prompts; None without a price."""
        usd, timed, job = self.hardware.usd_per_hour, self.timing, self.job
        run_s = timed.speculative_run_s if (timed.speedup or 0.0) > 1 else timed.plain_run_s
        if usd is None or run_s is None:
            return None
        return usd / _SECONDS_PER_HOUR * _MILLION * run_s / (job.batch_size * job.num_replicas)

    def __repr__(self) -> str:
        job, machine, full, timed = self.job, self.hardware, self.fullest, self.timing
        drafted = job.draft.name if job.draft else job.free_draft
        models = job.target.name if drafted is None else f"{job.target.name}, draft {drafted}"
        verdict = "fits" if self.fits else "does not fit"
        memory_used = f"{full.needed_bytes / GIB:.1f} of {full.capacity_bytes / GIB:.1f} GiB on rank {full.rank}"
        times = [timed.plain_s, *([] if timed.speculative_s is None else [timed.speculative_s])]
        speed = " plain, ".join(f"{1e3 * seconds:.1f} ms/token" for seconds in times)
        return f"Plan({models}, on {machine.num_ranks} x {machine.gpu}: {verdict}, {memory_used}; {speed})"


def make_plan(job: PlanSpec, hardware: HardwareConfig, *, remark: str | None = None) -> Plan:
    """Make the plan of a job, with `remark` as its first note. Raises as `memory`."""
    ranks, timed = memory(job, hardware), timing(job, hardware)
    fullest = min(ranks, key=lambda rank: rank.free_bytes)
    heads = tuple(rank.target_heads for rank in ranks if rank.rank in job.target_devices)  # of the first replica
    return Plan(
        job=job,
        hardware=hardware,
        ranks=ranks,
        timing=timed,
        largest_batch=largest_batch(job, hardware),
        largest_context=largest_context(job, hardware),
        warnings=(
            *advice.warnings(job, hardware, timed),
            *advice.slower_overlapped(job, hardware, timed),
            *faster_on_fewer(job, hardware, timed),
        ),
        notes=(
            *([remark] if remark else []),
            *notes_on_families(*filter(None, (job.target, job.draft))),
            *notes_on_storage(job),
            *notes_on_contexts(job),
            *unmeasured(job, hardware),
            *advice.notes(job, hardware, heads, fullest),
            *advice.better_draft(job, hardware, timed),
            *remarks(job, timed.acceptance, timed.best_num_draft_tokens_range),
        ),
        changes=() if fullest.fits else tuple(changes_that_fit(job, hardware)),
    )


def require_room(plan: Plan, *, words: Mapping[str, str] | None = None) -> None:
    """Raise CapacityError with its `shortage` for a plan that does not fit."""
    if not plan.fits:
        raise CapacityError(shortage(plan, words=words))


def shortage(plan: Plan, *, words: Mapping[str, str] | None = None) -> str:
    """An error message: the fullest rank, its items, its capacity, and the changes that fit, the smallest first.

    `words` has, by setting of `llama-ssp plan`, what to print instead if the caller has another; {} is the value.
    """
    full = plan.fullest
    names = {
        "target": full.target_weights_bytes,
        "draft": full.draft_weights_bytes,
        "cache": full.target_cache_bytes + full.draft_cache_bytes,
        "activations and logits": full.activations_bytes + full.logits_bytes,
        "graphs": full.graphs_bytes,
        "context, collectives and slack": full.context_bytes + full.collectives_bytes + full.slack_bytes,
    }
    items = ", ".join(f"{name} {size / GIB:.1f}" for name, size in names.items() if size >= GIB / 20)
    loading = " while loading" if full.loading_peak_bytes > full.total_bytes else ""
    needed, capacity = full.needed_bytes / GIB, full.capacity_bytes / GIB
    start = f"rank {full.rank} needs {needed:.1f} GiB{loading} ({items}) of {capacity:.1f} GiB"
    if not plan.changes:
        return f"{start}; none of the changes that were tried fits: use a larger machine, hardware=NAME"
    smallest, *others = (_told(change, words or {}) for change in plan.changes)
    also = f"; other changes that fit: {', or '.join(others)}" if others else ""
    return f"{start}; the smallest change that fits: {smallest}{also}"


def _told(change: Change, words: Mapping[str, str]) -> str:
    """The settings of a change, and what its plan says."""
    named = [setting.split("=", 1) for setting in change.settings]
    settings = " ".join((words[name].format(value) if name in words else said(name, value)) for name, value in named)
    tight, ms = ", tight" if change.fullest.is_tight else "", rounded(1e3 * change.timed.best_s)
    return f"{settings} ({change.fullest.needed_bytes / GIB:.1f} GiB{tight}, {ms} ms/token)"


def document(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON document."""
    job = plan.job
    return {
        "plan_version": PLAN_VERSION,
        "fits": plan.fits,
        "is_tight": plan.fits and plan.fullest.is_tight,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "hardware": asdict(plan.hardware),
        "target": _model(job.target, plan, prefix="target") | {
            "kind": job.target_kind.name,
            "ranks": list(job.target_ranks),
            "devices": list(job.target_devices),
            "heads_per_rank": [rank.target_heads for rank in plan.ranks if rank.rank in job.target_devices],
        },
        "draft": _model(job.draft, plan, prefix="draft")
        | {"kind": job.draft_kind.name, "ranks": list(job.draft_ranks)}
        if job.draft
        else None,
        "job": {
            "batch_size": job.batch_size,
            "prompt_tokens": job.prompt_tokens,
            "max_new_tokens": job.max_new_tokens,
            "num_draft_tokens": job.num_draft_tokens if job.drafts else 0,
            "adapts": job.adapts,
            "tree": job.tree and job.tree.text,
            "overlaps": job.overlaps,
            "free_draft": job.free_draft,
            "num_slots": job.num_slots,
            "cuda_graphs": job.cuda_graphs,
            "num_replicas": job.num_replicas,
        },
        "memory": [rank.as_items() for rank in plan.ranks],
        "largest_rank": plan.fullest.rank,
        "largest_batch": plan.largest_batch,
        "largest_context": plan.largest_context,
        "time": time_document(plan.timing, num_rows=job.batch_size * job.num_replicas),
        "basis": basis(plan.hardware),
        "messages": _messages(job),
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
        "shortage": None if plan.fits else shortage(plan),
        "changes": [change.document() for change in plan.changes],
    }  # fmt: skip


def _messages(job: PlanSpec) -> dict[str, int]:
    """Bytes received in a round over all ranks of a replica, by kind of message."""
    found = round_messages(job, job.num_draft_tokens if job.drafts else 0)
    none = dict.fromkeys(("taps_bytes", "ids_bytes", "probabilities_bytes", "verdict_bytes"), 0)
    arriving = none | {f"{kind}_bytes": message.received_bytes for kind, message in found.items()}
    return arriving | {"total_bytes": sum(arriving.values())}


def _model(model: PlannedModel, plan: Plan, *, prefix: str) -> dict[str, Any]:
    """A model's exact sizes, and the bytes that its ranks repeat."""
    whole = inventory(model.shape)
    is_partial = prefix == "draft" and plan.job.shares_embedding
    once = model_bytes(replace(whole, embeddings=()) if is_partial else whole, model, device=plan.job.device)
    held = sum(getattr(rank, f"{prefix}_weights_bytes") for rank in plan.ranks)
    return {
        "name": model.name,
        "dtype": model.dtype.name,
        "matrix_dtype": model.matrix_dtype(plan.job.device).name,
        "quantization": model.quantization,
        "stored_format": model.stored_format and model.stored_format.name,
        "num_parameters": whole.num_parameters,
        "weights_bytes": once.total_bytes,
        "repeated_bytes": held - once.total_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(model),
    }


def basis(hardware: HardwareConfig) -> str:
    """Say where the times are from."""
    machine = "GPU" if hardware.device == "cuda" else "machine"
    if hardware.is_measured:
        return f"forecast by what task=calibrate measured on this {machine}"
    if any(_FINDINGS in source for source in hardware.sources.values()):
        return f"forecast by data sheet; this engine has run on one {machine} of this kind ({_FINDINGS})"
    if hardware.products:
        return "forecast by what the first run on this machine measured, and by a laptop's data sheet"
    return f"forecast by data sheet; this engine has not been measured on this {machine}"


_TIMES_MS = {
    "plain_ms_per_token": "plain_s", "speculative_ms_per_token": "speculative_s",
    "plain_first_token_ms": "plain_prefill_s", "first_token_ms": "prefill_s", "prefill_ms": "prefill_s",
    "plain_run_ms_per_token": "plain_run_s", "speculative_run_ms_per_token": "speculative_run_s",
    "round_ms": "round_s", "draft_step_ms": "draft_forward_s", "verify_ms": "verify_s",
}  # fmt: skip
_RANGES_MS = {
    "plain_ms_per_token_range": "plain_s_range", "speculative_ms_per_token_range": "speculative_s_range",
    "first_token_ms_range": "prefill_s_range",
}  # fmt: skip
_RATES = {
    "plain_tokens_per_s": "plain_s", "speculative_tokens_per_s": "speculative_s",
    "plain_run_tokens_per_s": "plain_run_s", "speculative_run_tokens_per_s": "speculative_run_s",
}  # fmt: skip
_AS_THEY_ARE = (
    "speedup", "cost_ratio", "num_draft_tokens", "tokens_per_round", "tokens_per_round_range", "best_num_draft_tokens",
    "best_num_draft_tokens_range", "overlap", "copy_share", "limit_share",
)  # fmt: skip
"""Figures of `Timing` by their names in the document."""


def time_document(timed: Timing, *, num_rows: int) -> dict[str, Any]:
    """Times of a completion in milliseconds, tokens/s of all `num_rows` of all replicas, ratios, and assumptions."""

    def parts(forward: ForwardTime | None) -> dict[str, float] | None:
        seconds = asdict(forward) | {"total_s": forward.total_s} if forward else {}
        return {f"{name.removesuffix('_s')}_ms": 1e3 * value for name, value in seconds.items()} or None

    def figures(names: Mapping[str, str], shown: Callable[[Any], Any]) -> dict[str, Any]:
        found = {name: getattr(timed, attribute) for name, attribute in names.items()}
        return {name: None if value is None else shown(value) for name, value in found.items()}

    acceptance = timed.acceptance
    return {
        **figures(_TIMES_MS, lambda seconds: 1e3 * seconds),
        **figures(_RANGES_MS, lambda ends: [1e3 * seconds for seconds in ends]),
        **figures(_RATES, lambda seconds: num_rows / seconds),
        **figures({name: name for name in _AS_THEY_ARE}, lambda value: [*value] if isinstance(value, tuple) else value),
        "target_forward": parts(timed.target_forward),
        "verify_forward": parts(timed.verify_forward),
        "acceptance": acceptance and acceptance.probability,
        "acceptance_range": acceptance.ends and [*acceptance.ends] if acceptance else None,
        "acceptance_source": acceptance and acceptance.source,
        "acceptance_is_forecast": acceptance and acceptance.is_forecast,
        "speculative_ms_per_token_by_k": [1e3 * seconds for seconds in timed.by_num_draft_tokens],
    }
