"""All ways to use ranks for a spec, and the fastest of them, which `placement=auto` takes.

The ranks form one block per replica, and the blocks have equal sizes. Inside a block:

    target   all ranks of the block; all but the last few, if the draft has ranks of its own
             or one stage of its layers on each node
    draft    whole on the first rank; sharded; whole on every rank, for its share of the rows; on the last ranks

16 ranks are 1 replica of 16, 2 of 8 (a node each), 4 of 4, 8 of 2, or 16 of 1.
"""

from collections.abc import Iterator
from dataclasses import replace

from llama_ssp.architectures.family import record_of
from llama_ssp.errors import PlacementError
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import fullest_rank
from llama_ssp.planning.spec import PlanSpec, block_sizes, on_block
from llama_ssp.planning.timing import timing
from llama_ssp.settings.layout import named
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.text.messages import rounded


def layouts(
    spec: PlanSpec, *, num_ranks: int, divides: bool, thorough: bool, node_size: int | None = None
) -> Iterator[PlanSpec]:
    """Yield the spec in every layout of `num_ranks` ranks; the spec's own ranks and draft kind are ignored.

    Each of its replicas gets as many ranks as possible; with `divides` there are also layouts of more replicas with
    fewer ranks. A draft has one rank or all ranks of the replica, with `thorough` also each number between. A replica
    that consists of several whole nodes of `node_size` ranks also gets layouts with a stage on each node.
    """
    most = num_ranks // spec.num_replicas
    for size in block_sizes(most) if divides else [most]:
        one = replace(spec, num_replicas=num_ranks // size)
        yield from on_block(one, size, thorough=thorough)
        num_nodes, odd = divmod(size, node_size or size)
        has_stages = record_of(spec.target.shape.model_type).has_stages and not spec.target.by_library
        if num_nodes > 1 and not odd and has_stages and num_nodes <= spec.num_target_layers:
            yield from on_block(one, size, thorough=thorough, num_stages=num_nodes)


def choose_placement(
    spec: PlanSpec, hardware: HardwareConfig, *, num_ranks: int, divides: bool = False
) -> tuple[PlanSpec, str]:
    """Choose by the forecast time of a completion, prompt included, among the placements that fit.

    The ranks and draft kind of `spec` are ignored. Each replica uses an equal block of `num_ranks`, of which `hardware`
    may have more; `divides` allows more replicas on smaller blocks. A target that fits into a node stays in it: what
    sums over slower links take is a guess.

    Returns:
        The spec with the chosen ranks, and a sentence that gives the reason. If nothing fits, it is the first placement
        that can be laid out; its plan says what is missing.

    Raises:
        PlacementError: none can be laid out.
    """
    possible: list[PlanSpec] = []
    timed: list[tuple[float, PlanSpec]] = []
    error = None
    near_ranks = hardware.num_gpus
    for candidate in layouts(spec, num_ranks=num_ranks, divides=divides, thorough=True, node_size=near_ranks):
        try:
            if fullest_rank(candidate, hardware).fits:
                forecast = timing(candidate, hardware)
                timed.append((forecast.speculative_run_s or forecast.plain_run_s, candidate))
            possible.append(candidate)
        except PlacementError as found:
            error = error or found
    if error and not possible:
        raise error
    if not timed:
        return possible[0], f"placement=auto: none fits, this plan has {_described(possible[0])}"
    near = [pair for pair in timed if not _crosses_slow_links(pair[1], hardware)]
    (run_s, chosen), *others = sorted(near or timed, key=lambda pair: pair[0])
    compared = ", the only one that fits"
    if others:
        second_s, second = others[0]
        compared = f"; the second of {len(timed)} that fit is {_described(second)} at {rounded(1e3 * second_s)}"
    return chosen, f"placement=auto: {_described(chosen)}, forecast at {rounded(1e3 * run_s)} ms per token{compared}"


def _crosses_slow_links(spec: PlanSpec, hardware: HardwareConfig) -> bool:
    """Whether ranks that share layers are on several nodes."""
    network, size = hardware.network, len(spec.layout.ranks)
    if network is None or network.latency_s <= hardware.link.latency_s:
        return False
    starts, num_gpus = range(0, size * spec.num_replicas, size), hardware.num_gpus
    ends = [(ranks[0], ranks[-1]) for ranks in spec.layout.stages]
    return any((start + one) // num_gpus != (start + other) // num_gpus for start in starts for one, other in ends)


def _described(spec: PlanSpec) -> str:
    copies = f"{spec.num_replicas} replicas, each with " if spec.num_replicas > 1 else ""
    target = f"{copies}the target on {named(spec.target_ranks)}"
    if spec.num_stages > 1:
        target += f" in {spec.num_stages} stages"
    if not spec.draft:
        return target
    kind = "" if spec.draft_kind is DraftLayout.one_rank else f" ({spec.draft_kind.name})"
    return f"{target} and the draft on {named(spec.draft_ranks)}{kind}"
