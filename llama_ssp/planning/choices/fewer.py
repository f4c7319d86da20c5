"""Says when a job decodes faster on fewer ranks, or when more replicas of fewer ranks serve its batch better."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.schema import TargetKind
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.layouts import block_sizes, same_kind
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import Timing, timing
from llama_ssp.words import counted, rounded

CLEAR_GAIN = 1.1


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The job on blocks of fewer ranks, all ranks in use, and its rows divided among the replicas."""

    job: PlanSpec
    timed: Timing


def faster_on_fewer(job: PlanSpec, hardware: HardwareConfig, timed: Timing) -> Iterator[str]:
    """A sentence if smaller blocks decode the same rows clearly faster."""
    size = len(job.layout.ranks)
    if job.target_kind is not TargetKind.tensor or size == 1:
        return
    best: _Block | None = None
    for smaller in block_sizes(size)[1:]:
        found = _on_smaller(job, hardware, smaller, times=size // smaller)
        if found is None or (best and found.timed.best_s >= best.timed.best_s):
            break
        best = found
    if best and timed.best_s >= CLEAR_GAIN * best.timed.best_s:
        yield _sentence(job, hardware, timed, best)


def _on_smaller(job: PlanSpec, hardware: HardwareConfig, size: int, *, times: int) -> _Block | None:
    rows = -(-job.batch_size // times)
    smaller = same_kind(replace(job, batch_size=rows, num_replicas=job.num_replicas * times), size)
    try:
        if smaller is None or not fits(smaller, hardware):
            return None
        return _Block(job=smaller, timed=timing(smaller, hardware))
    except PlacementError:
        return None


def _sentence(job: PlanSpec, hardware: HardwareConfig, timed: Timing, best: _Block) -> str:
    num_ranks, size = len(job.layout.ranks), len(best.job.layout.ranks)
    num_nodes = {count: -(-count // hardware.num_gpus) for count in (num_ranks, size)}
    is_node = num_nodes[num_ranks] > 1 and size == hardware.num_gpus * num_nodes[size]
    where = counted(num_nodes[size], "node") if is_node else counted(size, hardware.unit)
    verb = "is" if (num_nodes[size] if is_node else size) == 1 else "are"
    of_all = f"all {num_nodes[num_ranks]}" if is_node else f"all {num_ranks}"
    num_replicas, rows = best.job.num_replicas, best.job.batch_size
    total = rows * num_replicas / best.timed.best_s
    settings = f"placement.num_replicas={num_replicas}" + (f" batch_size={rows}" if rows != job.batch_size else "")
    if job.batch_size > 1:
        here = job.batch_size * job.num_replicas / timed.best_s
        return (
            f"replicas would serve the batch better: {num_replicas}, each on {where} with {counted(rows, 'row')}, "
            f"decode {rounded(total, 4)} tokens/s at {_times(best.timed)}, here {rounded(here, 4)} at {_times(timed)}: "
            f"{settings}"
        )
    return (
        f"{where} {verb} faster than {of_all}: {_times(best.timed)}, here {_times(timed)}; {settings} "
        f"uses all for {rounded(total, 4)} tokens/s"
    )


def _times(timed: Timing) -> str:
    plain = f"{rounded(1e3 * timed.plain_s)} ms/token"
    if timed.speculative_s is None:
        return plain
    return f"{plain} plain and {rounded(1e3 * timed.speculative_s)} with the draft"
