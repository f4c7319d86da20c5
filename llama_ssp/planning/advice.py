"""What a plan should tell its reader beyond figures: choices that cannot gain, and what this version cannot run yet."""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.config.plan import TargetLayout
from llama_ssp.config.schema import DraftLayout, Quantization
from llama_ssp.errors import PlacementError
from llama_ssp.planning.job import Job
from llama_ssp.planning.timing import Timing, timing

WORTHWHILE_GAIN, CLEAR_GAIN = 1.03, 1.1
RUNS_TARGET = {TargetLayout.tensor}


def not_run_yet(job: Job) -> list[str]:
    """Name the choices of a job that this version plans but cannot run."""
    found = []
    if job.target_kind not in RUNS_TARGET:
        found.append(f"placement.target.kind={job.target_kind.name}")
    return found


def notes(job: Job, heads: tuple[int, ...], largest_rank: int) -> list[str]:
    """Facts of a plan that its figures do not show."""
    found = []
    if missing := not_run_yet(job):
        found.append(f"planned, but this version cannot run it yet: {', '.join(missing)}")
    if len(set(heads)) > 1:
        shared = " ".join(map(str, heads))
        num_heads = job.target.shape.num_attention_heads
        found.append(f"{num_heads} heads over {len(heads)} ranks: {shared}; rank {largest_rank} needs most")
    return found


def warnings(job: Job, hardware: HardwareConfig, timed: Timing) -> list[str]:
    """Choices that cost more than they bring, each with what would be better."""
    return [*_quantization(job, hardware), *_draft(job, hardware, timed)]


def _quantization(job: Job, hardware: HardwareConfig) -> Iterator[str]:
    if hardware.device != "cuda":
        models = [model for model in (job.target, job.draft) if model]
        if hardware.profiles and any(model.quantization is not Quantization.none for model in models):
            yield "the times are those of unquantized layers: quantized ones have not been measured on this machine"
        return
    if job.draft and job.draft.quantization is Quantization.int8:
        yield (
            f"an int8 draft through bitsandbytes cannot gain: it decodes 3-5x slower than {job.draft.dtype.name} "
            "(published); use draft.model.quantization=none or int8_weight_only"
        )
    if job.target.quantization is Quantization.int8:
        yield (
            f"an int8 target through bitsandbytes saves memory, not time: it decodes 3-5x slower than "
            f"{job.target.dtype.name} (published)"
        )


def _draft(job: Job, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    if job.draft is None or timed.speedup is None or timed.best_num_draft_tokens is None:
        return
    asked, number = timed.speedup, timed.best_num_draft_tokens
    best = timed.plain_s / timed.by_num_draft_tokens[number - 1]
    better = _better_place(job, hardware, best)
    if asked <= 1:
        where = "alone on one GPU" if len(job.draft_ranks) == 1 else f"on {len(job.draft_ranks)} GPUs"
        most = "no K gains" if best <= 1 else f"the best, K={number}, {best:.2f}x"
        yield (
            f"the draft cannot gain: {job.draft.name} {where} costs {timed.cost_ratio:.2f} of a step of "
            f"{job.target.name} on {len(job.target_ranks)}; K={job.num_draft_tokens} gives {asked:.2f}x, {most}{better}"
        )
    elif better:
        yield f"the draft would gain more elsewhere: {asked:.2f}x here{better}"
    elif best / asked >= WORTHWHILE_GAIN:
        yield f"K={job.num_draft_tokens} gives {asked:.2f}x; speculation.num_draft_tokens={number} gives {best:.2f}x"


def _better_place(job: Job, hardware: HardwareConfig, best: float) -> str:
    """What sharding the draft like the target would bring, where that is clearly more than the best K brings here."""
    if job.draft_kind is DraftLayout.sharded or len(job.target_ranks) == 1:
        return ""
    try:
        sharded = timing(replace(job, draft_kind=DraftLayout.sharded, draft_ranks=job.target_ranks), hardware)
    except PlacementError:
        return ""
    if sharded.speedup is None or sharded.speedup < CLEAR_GAIN * best:
        return ""
    return f"; placement.draft.kind=sharded costs {sharded.cost_ratio:.2f} and gives {sharded.speedup:.2f}x"
