"""Warnings and notes of a plan: choices that cannot gain, and facts that the figures do not show."""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.architectures.family import inventory
from llama_ssp.config.formats import format_of
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import DraftLayout, Offload, TargetKind
from llama_ssp.errors import PlacementError
from llama_ssp.planning.layerwise import GB, READ_BYTES_PER_S, waiting_bytes
from llama_ssp.planning.memory import RankMemoryPlan
from llama_ssp.planning.spec import PlannedModel, PlanSpec, model_bytes
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.words import counted, rounded

GIB = 2**30
WORTHWHILE_GAIN, CLEAR_GAIN = 1.03, 1.1


def notes(job: PlanSpec, hardware: HardwareConfig, heads: tuple[int, ...], fullest: RankMemoryPlan) -> Iterator[str]:
    """Facts that the figures of a plan do not show, such as what it leaves out if a library places the target."""
    if fullest.is_tight:
        share = 100 * fullest.free_bytes / fullest.capacity_bytes
        yield f"a tight fit: {share:.1f} % of the memory of rank {fullest.rank} is left, and some items are estimates"
    if hardware.device == "cpu" and hardware.system_bytes:
        yield (
            f"{hardware.system_bytes / GIB:.3g} of {hardware.memory_bytes / GIB:.3g} GiB are left to the operating "
            "system and other programs (hardware.system_bytes)"
        )
    models = [model for model in (job.target, job.draft) if model]
    if hardware.device == "cpu" and hardware.profiles and any(_is_quantized(model) for model in models):
        yield "the times are those of unquantized layers: quantized layers were not measured on this machine"
    if job.target_kind is TargetKind.accelerate:
        num_devices = len(job.target_devices)
        where = "on one device" if num_devices == 1 else f"over {num_devices} GPUs of rank {job.target_ranks[0]}"
        yield f"the target is placed layer-wise {where}; host time in accelerate's hooks is not forecast"
    if num_bytes := waiting_bytes(job):
        place = "host memory" if job.offload is Offload.cpu else "disk"
        yield (
            f"{num_bytes / GB:.4g} GB of the target are offloaded to {place}, whose capacity is not checked; every "
            f"forward reads them at an estimated {READ_BYTES_PER_S[job.offload] / GB:g} GB/s"
        )
    if job.target_kind is TargetKind.deepspeed:
        whole = model_bytes(inventory(job.target.shape), job.target, device=job.device).total_bytes
        yield (
            f"while loading, DeepSpeed keeps the whole target in host memory on every rank, {whole / GB:.4g} GB each, "
            "whose capacity is checked on a CPU only; host time in its modules is not forecast"
        )
    if len(set(heads)) > 1:
        num_heads, shares = job.target.shape.num_attention_heads, " ".join(map(str, heads))
        yield f"{num_heads} heads over {len(heads)} ranks: {shares}; rank {fullest.rank} needs most"


def warnings(job: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """Choices that cost more than they gain, each with a better one."""
    yield from _quantization(job, hardware)
    yield from _draft(job, hardware, timed)


def slower_overlapped(job: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """A sentence if drafting while the target verifies takes longer than doing one after the other."""
    if not job.overlaps or timed.speculative_s is None:
        return
    in_turn_s = timing(replace(job, overlap=False), hardware).speculative_s
    if in_turn_s and timed.speculative_s > in_turn_s:
        with_overlap, in_turn = (rounded(1e3 * seconds) for seconds in (timed.speculative_s, in_turn_s))
        yield (
            f"overlapping drafting and verification does not gain: forecast {with_overlap} ms/token with "
            f"speculation.overlap=true, {in_turn} with speculation.overlap=false"
        )


def _quantization(job: PlanSpec, hardware: HardwareConfig) -> Iterator[str]:
    if hardware.device != "cuda":
        return
    if job.draft and (advice := format_of(job.draft.quantization).draft_advice):
        yield advice.format(dtype=job.draft.dtype.name)
    if advice := format_of(job.target.quantization).target_advice:
        yield advice.format(dtype=job.target.dtype.name)


def _is_quantized(model: PlannedModel) -> bool:
    return format_of(model.quantization).is_quantized


def _draft(job: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    if job.draft is None or timed.speedup is None or timed.best_num_draft_tokens is None:
        return
    asked, number = timed.speedup, timed.best_num_draft_tokens
    best = timed.plain_s / timed.by_num_draft_tokens[number - 1]
    better = _better_place(job, hardware, best)
    if asked <= 1:
        alone = len(job.draft_ranks) == 1 < len(job.target_ranks)
        where = f"{'alone ' if alone else ''}on {_place(hardware, len(job.draft_ranks))}"
        most = "no K gains" if best <= 1 else f"the best, K={number}, {best:.2f}x"
        yield (
            f"the draft cannot gain: {job.draft.name} {where} costs {timed.cost_ratio:.2f} of a step of "
            f"{job.target.name} on {_place(hardware, len(job.target_ranks))}; "
            f"K={timed.num_draft_tokens} gives {asked:.2f}x, {most}{better}"
        )
    elif better:
        yield f"the draft would gain more elsewhere: {asked:.2f}x here{better}"
    elif best / asked >= WORTHWHILE_GAIN and not job.adapts and timed.knows_best_k:
        yield f"K={job.num_draft_tokens} gives {asked:.2f}x; speculation.num_draft_tokens={number} gives {best:.2f}x"


def _place(hardware: HardwareConfig, num_ranks: int) -> str:
    """Ranks in words: GPUs, or on a CPU the machine as a whole."""
    is_whole = hardware.device == "cpu" and num_ranks == 1 == hardware.num_gpus
    return "one machine" if is_whole else counted(num_ranks, hardware.unit)


def _better_place(job: PlanSpec, hardware: HardwareConfig, best: float) -> str:
    """A clause about sharding the draft like the target, if that gains clearly more than the best K does here."""
    if job.draft_kind is DraftLayout.sharded or len(job.target_ranks) == 1:
        return ""
    try:
        sharded = timing(replace(job, draft_kind=DraftLayout.sharded, draft_ranks=job.target_ranks), hardware)
    except PlacementError:
        return ""
    if sharded.speedup is None or sharded.speedup < CLEAR_GAIN * best:
        return ""
    return f"; placement.draft.kind=sharded costs {sharded.cost_ratio:.2f} and gives {sharded.speedup:.2f}x"
