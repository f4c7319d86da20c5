"""Finds the smallest change of settings that makes a plan fit.

Each step is one setting, with a weight that says how much it deviates from the request. Combinations of up to three
steps are tried in order of weight; the first that fits is the answer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from llama_ssp.config import catalogue
from llama_ssp.config.formats.format import format_of, formats
from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, Dtype, WholeParts
from llama_ssp.config.target_placement import TargetKind
from llama_ssp.errors import PlacementError
from llama_ssp.planning.memory import fits, largest_batch, largest_context, memory
from llama_ssp.planning.spec import PlanSpec, planned_model

MOST_STEPS = 3
MOST_NODES = 4
_Planned = tuple[PlanSpec, HardwareConfig]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings to add to the command line, and the bytes that the fullest rank then needs."""

    settings: tuple[str, ...]
    needed_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One setting and its effect on the job; steps of the same `kind` exclude each other."""

    kind: str
    weight: int
    setting: str
    apply: Callable[[PlanSpec, HardwareConfig], _Planned]


def smallest_changes(job: PlanSpec, hardware: HardwareConfig) -> list[Change]:
    """Return the smallest change that makes a plan fit; empty if nothing that was tried fits."""
    possible = list(_steps(job, hardware))
    tried = [chosen for number in range(1, MOST_STEPS + 1) for chosen in combinations(possible, number)]
    allowed = [chosen for chosen in tried if len({step.kind for step in chosen}) == len(chosen)]
    for steps in sorted(allowed, key=lambda chosen: (sum(step.weight for step in chosen), len(chosen))):
        if changed := _applied(steps, job, hardware):
            settings = tuple(step.setting for step in steps)
            return [Change(settings=settings, needed_bytes=max(rank.needed_bytes for rank in memory(*changed)))]
    return []


def _applied(steps: tuple[_Step, ...], job: PlanSpec, hardware: HardwareConfig) -> _Planned | None:
    """The job with these steps applied; None if it does not fit or cannot be laid out."""
    try:
        for step in steps:
            job, hardware = step.apply(job, hardware)
        return (job, hardware) if fits(job, hardware) else None
    except PlacementError:
        return None


def _steps(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Step]:
    yield from _sizes(job, hardware)
    yield from _draft(job)
    short = job.target.stored
    if job.device == "cpu" and job.target.dtype is Dtype.fp32 and short in {Dtype.bf16, Dtype.fp16}:
        # Slower, but halves everything that a CPU keeps in fp32 for 16-bit files.
        yield _step("precision", 2, f"model.dtype={short.name}", target=replace(job.target, dtype=short))
    for storage in () if format_of(job.target.quantization).is_quantized else formats().values():
        if storage.change_weight is not None:
            target = job.target.quantized(storage.name)
            yield _step("precision", storage.change_weight, f"model.quantization={storage.name}", target=target)
    if hardware.network and job.target_kind is not TargetKind.accelerate:  # one rank has the GPUs of one node
        for num_nodes in range(hardware.num_nodes + 1, MOST_NODES + 1):
            spread = partial(_on_nodes, num_nodes=num_nodes)
            yield _Step(kind="nodes", weight=4 + num_nodes, setting=f"hardware.num_nodes={num_nodes}", apply=spread)
    for index, name in enumerate(reversed(_smaller(job.target.name))):
        target = planned_model(catalogue.load(name), device=job.device)
        target = replace(target, by_library=job.target.by_library)
        yield _step("target", 8 + index, f"model={name}", target=target)


def _sizes(job: PlanSpec, hardware: HardwareConfig) -> Iterator[_Step]:
    rows = max(largest_batch(job, hardware, limit=job.batch_size), 1)
    if rows < job.batch_size:
        yield _step("batch", 1, f"batch_size={rows}", batch_size=rows)
    prompt = largest_context(job, hardware) - job.max_new_tokens
    if 0 < prompt < job.prompt_tokens:
        yield _step("context", 1, f"prompt_tokens={prompt}", prompt_tokens=prompt)


def _draft(job: PlanSpec) -> Iterator[_Step]:
    if job.draft is None:
        return
    if job.draft_kind is not DraftLayout.sharded and len(job.target_ranks) > 1:
        sharded = DraftLayout.sharded
        setting = f"placement.draft.kind={sharded.name}"
        yield _step("placement", 1, setting, draft_kind=sharded, draft_ranks=job.target_ranks)
    nothing, is_cut = WholeParts.none, job.draft_kind is not DraftLayout.replicated and len(job.draft_ranks) > 1
    if is_cut and job.draft_whole is not nothing:
        yield _step("placement", 1, f"placement.draft.whole={nothing.name}", draft_whole=nothing)
    for index, name in enumerate(reversed(_smaller(job.draft.name))):
        yield _step("draft", 2 + index, f"draft={name}", draft=planned_model(catalogue.load(name), device=job.device))
    yield _step("draft", 6, "draft=none", draft=None, draft_ranks=())


def _step(kind: str, weight: int, setting: str, **fields: Any) -> _Step:  # noqa: ANN401 - fields of a job
    """A setting that changes only fields of the job."""

    def apply(job: PlanSpec, hardware: HardwareConfig) -> _Planned:
        return replace(job, **fields), hardware

    return _Step(kind=kind, weight=weight, setting=setting, apply=apply)


def _smaller(name: str) -> list[str]:
    """Smaller models of the same family and vocabulary, the smallest first."""
    return catalogue.smaller_relatives(catalogue.load(name)) if name in catalogue.names() else []


def _on_nodes(job: PlanSpec, hardware: HardwareConfig, num_nodes: int) -> _Planned:
    """The job over all ranks of a replica on more nodes; a draft on the target's ranks stays on them."""
    ranks = tuple(range(hardware.num_gpus * num_nodes // job.num_replicas))
    followed = bool(job.draft) and job.draft_ranks == job.target_ranks
    changed = replace(job, target_ranks=ranks, draft_ranks=ranks if followed else job.draft_ranks)
    return changed, replace(hardware, num_nodes=num_nodes)
