"""Makes a plan, the memory, time and advice for one spec on one machine, and its JSON document.

`reports.plan_tables` shows it. `plan_version` changes when a field of the document is renamed or
removed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from llama_ssp.architectures.engine import OWN_SUM_BYTES
from llama_ssp.architectures.family import inventory
from llama_ssp.errors import CapacityError, refuse
from llama_ssp.machines.hardware import MEASURED, HardwareConfig
from llama_ssp.planning.acceptance import remarks
from llama_ssp.planning.advisers import ChangeOfPlan, changes_of
from llama_ssp.planning.advisers import said as advised
from llama_ssp.planning.collectives import all_reduce_s, round_messages
from llama_ssp.planning.forwards import ForwardTime
from llama_ssp.planning.memory import GIB, RankMemoryPlan, kv_bytes_per_token, largest_batch, largest_context, memory
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.notes import (
    notes_on_contexts,
    notes_on_families,
    notes_on_formats,
    notes_on_heads,
    notes_on_machine,
    notes_on_stages,
    notes_on_states,
    notes_on_whole_parts,
    refusals,
)
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel, Timing, timing
from llama_ssp.planning.weights import model_bytes
from llama_ssp.text.messages import counted, rounded, said

PLAN_VERSION = 5
_FINDINGS = "docs/findings/gpus.md"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Forecast of one spec on one machine: all that its text, its figure and its document say.

    Attributes:
        basis: where the times are from.
        largest_batch: the largest batch that fits at this context; 0 if none does.
        largest_context: the longest row that fits at this batch size.
        refusals: sentences on why runs refuse the models; empty if they do not.
        warnings: sentences on choices that cost more than they gain.
        notes: sentences on facts that the figures do not show.
        details: those of the `notes` that matter least.
        changes: changes that would make the plan fit, the best first; empty if it fits, None if none were tried.
        whole_run: a sentence on the time of a run whose prompts are known.
    """

    spec: PlanSpec
    hardware: HardwareConfig
    ranks: tuple[RankMemoryPlan, ...]
    timing: Timing
    basis: str
    largest_batch: int
    largest_context: int
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    details: tuple[str, ...]
    changes: tuple[ChangeOfPlan, ...] | None
    whole_run: str | None = None

    @property
    def num_groups(self) -> int:
        """Groups of rows that follow each other through stages."""
        return self.spec.num_groups or 1

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
        usd = self.hardware.usd_per_hour
        run_s, num_rows = self.timing.best_run_s, self.spec.num_rows
        return None if usd is None else usd / 3600 * 10**6 * run_s / num_rows

    def __repr__(self) -> str:
        spec, machine, full, timed = self.spec, self.hardware, self.fullest, self.timing
        models = ", draft ".join(filter(None, (spec.target.label, spec.draft.label if spec.draft else spec.free_draft)))
        verdict = "refused by runs" if self.refusals else "fits" if self.fits else "does not fit"
        times = [timed.plain_s, *filter(None, [timed.speculative_s])]
        speed = " plain, ".join(f"{1e3 * seconds:.1f} ms/token" for seconds in times)
        where = f"on {machine.num_ranks} x {machine.gpu}"
        return f"Plan({models}, {where}: {verdict}, {full.room} on rank {full.rank}; {speed})"


def make_plan(spec: PlanSpec, hardware: HardwareConfig, *, remark: str | None = None) -> Plan:
    """Make the plan of a spec, with `remark` as its first note. Raises as `memory`."""
    if spec.num_stages > 1:  # the groups count for memory too
        spec = replace(spec, num_groups=CostModel(spec, hardware).num_groups)
    ranks, timed = memory(spec, hardware), timing(spec, hardware)
    fullest = min(ranks, key=lambda rank: rank.free_bytes)
    heads = tuple(rank.target_heads for rank in ranks if rank.rank in spec.target_devices)  # of the first replica
    sums = tuple(_notes_on_sums(spec, hardware))
    details = *notes_on_heads(spec, heads, fullest), *sums[:1]
    return Plan(
        spec=spec,
        hardware=hardware,
        ranks=ranks,
        timing=timed,
        basis=basis(hardware),
        largest_batch=largest_batch(spec, hardware),
        largest_context=largest_context(spec, hardware),
        refusals=tuple(dict.fromkeys(refusals(spec))),
        warnings=(*advised("warnings", spec, hardware, timed),),
        notes=tuple(
            dict.fromkeys(
                (
                    *([remark] if remark else []),
                    *notes_on_families(*filter(None, (spec.target, spec.draft))),
                    *notes_on_formats(spec, hardware, timed),
                    *notes_on_states(spec),
                    *notes_on_whole_parts(spec),
                    *notes_on_stages(spec, hardware),
                    *notes_on_contexts(spec),
                    *notes_on_machine(spec, hardware, fullest),
                    *notes_on_heads(spec, heads, fullest),
                    *_notes_on_scoring(spec, hardware),
                    *sums,
                    *advised("notes", spec, hardware, timed),
                    *remarks(spec, timed.acceptance, timed.best_num_draft_tokens_range),
                )
            )
        ),
        details=details,
        changes=() if fullest.fits else changes_of(spec, hardware),
    )


def _notes_on_scoring(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[str]:
    if spec.scores_texts:
        seconds = CostModel(spec, hardware).scoring_s()
        yield (
            f"log-probabilities: the target reads all rows once more, {rounded(1e3 * seconds)} ms at the end, which "
            "ms/token leaves out"
        )


def _notes_on_sums(spec: PlanSpec, hardware: HardwareConfig) -> Iterator[str]:
    costs, num_draft_tokens = CostModel(spec, hardware), spec.num_draft_tokens * spec.drafts
    number, num_bytes = costs.collectives(num_draft_tokens)
    summing = costs.target if len(costs.target.ranks) > 1 else costs.draft
    if hardware.device != "cuda" or not number or summing is None or summing.backend.is_layer_wise:
        return
    sent = f"{counted(number, 'collective')} in a round, of {rounded(num_bytes / 1e6)} MB on each rank"
    if len(summing.ranks) == 1:
        yield sent
        return
    rows = spec.batch_size * (num_draft_tokens + 1 if summing is costs.target else 1)
    sum_bytes, num_ranks = summing.sum_bytes(rows), len(summing.ranks)
    seconds = all_reduce_s(hardware, summing.ranks, sum_bytes, is_own=summing.own_sums)
    by = "the program's kernel sums" if summing.own_sums and sum_bytes <= OWN_SUM_BYTES else "NCCL sums"
    origin = f"by {'figures of other programs' if hardware.sums else 'guess'} (task=calibrate measures it)"
    if hardware.network and summing.ranks[0] // hardware.num_gpus != summing.ranks[-1] // hardware.num_gpus:
        known = (
            "as measured" if hardware.sources.get("network") == MEASURED else "by guess (task=calibrate measures it)"
        )
        origin = f"{1e6 * hardware.network.latency_s:.3g} of it between nodes, {known}"
    elif hardware.is_measured:
        origin = "as measured"
    yield (f"{sent}; {by} {sum_bytes / 1024:.6g} KiB over {num_ranks} GPUs in {rounded(1e6 * seconds)} us, {origin}")
    if spec.own_sums and not summing.own_sums:
        yield "own_sums=true is planned with NCCL's sums: it needs GPUs of one node that reach each other's memory"


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


def require_room(plan: Plan, *, words: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for a plan of what runs refuse, and CapacityError with its `shortage` if it does not fit."""
    refuse(plan.refusals)
    if not plan.fits:
        raise CapacityError(shortage(plan, words=words))


def shortage(plan: Plan, *, words: Mapping[str, str] | None = None) -> str:
    """Return the error message of a plan that does not fit: the fullest rank, its items, its capacity, and what fits.

    Of the changes that fit, the smallest comes first. `words` maps settings of `llama-ssp plan` to phrases for callers
    that lack these settings, in which {} stands for the value.
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
    if plan.changes is None:
        return f"{start}: use a larger machine, hardware=NAME"
    if not plan.changes:
        return f"{start}; none of the changes that were tried fits: use a larger machine, hardware=NAME"
    smallest, *others = (_said(change, words or {}) for change in plan.changes)
    also = f"; other changes that fit: {', or '.join(others)}" if others else ""
    return f"{start}; the smallest change that fits: {smallest}{also}"


def _said(change: ChangeOfPlan, words: Mapping[str, str]) -> str:
    named = [setting.split("=", 1) for setting in change.settings]
    settings = " ".join((words[name].format(value) if name in words else said(name, value)) for name, value in named)
    tight, ms = ", tight" if change.fullest.is_tight else "", rounded(1e3 * change.timed.best_s)
    return f"{settings} ({change.fullest.needed_bytes / GIB:.1f} GiB{tight}, {ms} ms/token)"


_OF_SPEC = (
    "batch_size",
    "prompt_tokens",
    "max_new_tokens",
    "num_draft_tokens",
    "adapts",
    "tree",
    "overlaps",
    "free_draft",
    "num_slots",
    "cuda_graphs",
    "own_sums",
    "num_replicas",
)
_OF_RANK = ("needed_bytes", "free_bytes", "fits", "is_tight")
_TIMES_MS = {
    "plain_ms_per_token": "plain_s",
    "speculative_ms_per_token": "speculative_s",
    "plain_first_token_ms": "plain_prefill_s",
    "first_token_ms": "prefill_s",
    "prefill_ms": "prefill_s",
    "plain_run_ms_per_token": "plain_run_s",
    "speculative_run_ms_per_token": "speculative_run_s",
    "round_ms": "round_s",
    "draft_step_ms": "draft_forward_s",
    "verify_ms": "verify_s",
    "plain_ms_per_token_range": "plain_s_range",
    "speculative_ms_per_token_range": "speculative_s_range",
    "first_token_ms_range": "prefill_s_range",
}
_RATES = {
    "plain_tokens_per_s": "plain_s",
    "speculative_tokens_per_s": "speculative_s",
    "plain_run_tokens_per_s": "plain_run_s",
    "speculative_run_tokens_per_s": "speculative_run_s",
}
_RATIOS = (
    "speedup",
    "speedup_range",
    "cost_ratio",
    "num_draft_tokens",
    "tokens_per_round",
    "tokens_per_round_range",
    "best_num_draft_tokens",
    "best_num_draft_tokens_range",
    "overlap",
    "limit_share",
)
"""Fields of the document, from `PlanSpec`, `RankMemoryPlan` and `Timing`, by their names there."""


def document(plan: Plan) -> dict[str, Any]:
    """The fields of a plan as a JSON document, which docs/reference/plan-document.md describes."""
    spec, timed = plan.spec, plan.timing
    num_draft_tokens = spec.num_draft_tokens * spec.drafts
    number, num_bytes = CostModel(spec, plan.hardware).collectives(num_draft_tokens)
    sent = {f"{kind}_bytes": one.received_bytes for kind, one in round_messages(spec, num_draft_tokens).items()}
    messages = (
        dict.fromkeys(("taps_bytes", "ids_bytes", "probabilities_bytes", "hidden_bytes", "verdict_bytes"), 0) | sent
    )
    acceptance = timed.acceptance
    return {
        "plan_version": PLAN_VERSION,
        "refusals": [*plan.refusals],
        "fits": plan.fits,
        "is_tight": plan.fits and plan.fullest.is_tight,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "hardware": asdict(plan.hardware),
        "target": _model(spec.target, plan, prefix="target")
        | {
            "kind": spec.backend.name,
            "ranks": [*spec.target_ranks],
            "devices": [*spec.target_devices],
            "stages": _stages(plan),
            "heads_per_rank": [rank.target_heads for rank in plan.ranks if rank.rank in spec.target_devices],
        },
        "draft": _model(spec.draft, plan, prefix="draft") | {"kind": spec.draft_kind.name, "ranks": [*spec.draft_ranks]}
        if spec.draft
        else None,
        "job": {name: getattr(spec, name) for name in _OF_SPEC}
        | {
            "num_draft_tokens": num_draft_tokens,
            "tree": spec.tree and spec.tree.text,
        },
        "memory": [asdict(rank) | {name: getattr(rank, name) for name in _OF_RANK} for rank in plan.ranks],
        "largest_rank": plan.fullest.rank,
        "largest_batch": plan.largest_batch,
        "largest_context": plan.largest_context,
        "time": {
            **{name: _in_ms(getattr(timed, attribute)) for name, attribute in _TIMES_MS.items()},
            **{name: (seconds := getattr(timed, one)) and spec.num_rows / seconds for name, one in _RATES.items()},
            **{name: [*value] if isinstance(value := getattr(timed, name), tuple) else value for name in _RATIOS},
            "target_forward": _parts(timed.target_forward),
            "verify_forward": _parts(timed.verify_forward),
            "acceptance": acceptance and acceptance.probability,
            "acceptance_range": acceptance and acceptance.ends and [*acceptance.ends],
            "acceptance_source": acceptance and acceptance.source,
            "acceptance_is_forecast": acceptance and acceptance.is_forecast,
            "acceptance_by_position": acceptance
            and timed.num_draft_tokens
            and [*acceptance.by_position(acceptance.probability, spec.draft_depth)],
            "speculative_ms_per_token_by_k": _in_ms(timed.by_num_draft_tokens),
        },
        "basis": plan.basis,
        "messages": messages
        | {"total_bytes": sum(messages.values()), "collectives": number, "collectives_bytes": num_bytes},
        "warnings": [*plan.warnings],
        "notes": [*plan.notes],
        "shortage": None if plan.fits else shortage(plan),
        "changes": [change.document() for change in plan.changes or ()],
    }


def _model(model: PlannedModel, plan: Plan, *, prefix: str) -> dict[str, Any]:
    whole = inventory(model.shape)
    num_shared = plan.spec.num_shared_tables if prefix == "draft" else 0
    once = model_bytes(whole.without_tables(num_shared), model, device=plan.spec.device)
    held = sum(getattr(rank, f"{prefix}_weights_bytes") for rank in plan.ranks)
    return {
        "name": model.label,
        "dtype": model.dtype.name,
        "matrix_dtype": model.matrix_dtype(plan.spec.device).name,
        "quantization": model.quantization,
        "stored_format": model.stored_format and model.stored_format.name,
        "num_parameters": whole.num_parameters,
        "weights_bytes": once.total_bytes,
        "repeated_bytes": held - once.total_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(model),
    }


def _stages(plan: Plan) -> list[dict[str, Any]]:
    """Ranks, layers and time of each stage in a plain step, and the bytes of a token that it sends to the next one."""
    spec = plan.spec
    seconds = CostModel(spec, plan.hardware).stages_s(1)
    sent_bytes = *spec.hop_bytes, 0
    return [
        {"ranks": [*ranks], "num_layers": len(layers), "plain_ms": 1e3 * own_s, "sent_bytes_per_token": num_bytes}
        for ranks, layers, own_s, num_bytes in zip(spec.layout.stages, spec.stages, seconds, sent_bytes, strict=True)
    ]


def _in_ms(seconds: float | tuple[float, ...] | None) -> Any:  # noqa: ANN401 - as many figures as there are seconds
    return [*map(_in_ms, seconds)] if isinstance(seconds, tuple) else seconds and 1e3 * seconds


def _parts(forward: ForwardTime | None) -> dict[str, float] | None:
    parts = vars(forward) | {"total_s": forward.total_s} if forward else {}
    return {f"{name.removesuffix('_s')}_ms": 1e3 * seconds for name, seconds in parts.items()} or None
