"""Measures the profiles of a CPU for `task=calibrate`: of rank 0 alone with all cores, and of all ranks together.

A profile is made of parts (operators, messages, the rule) and of how whole pairs of models compare with their sum. The
pairs decode last, and those of all profiles in the same turns: a shared machine is faster in one minute than in
another, and plans compare numbers of ranks.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch

from llama_ssp.kernels.linear import COMPILED, can_halve, product_of
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import machine_of_run
from llama_ssp.machines.profile import LinearPoint, Profile, SizePoint
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import World, on_all_cores
from llama_ssp.run.calibration import model_pairs, operators
from llama_ssp.run.calibration.model_pairs import NUM_DRAFT_TOKENS, Pairs, PairTime
from llama_ssp.settings.schema import DraftLayout, Dtype, TargetKind

LEAST_RATIO = 0.1
NUM_TURNS = 9
"""How often each pair of a profile decodes."""

Show: TypeAlias = Callable[[str, int, int], None]
"""Called with a label, the steps that are done, and all steps."""
Parts: TypeAlias = Callable[[int, str], Profile]
"""Returns the parts for a number of ranks, which has a name."""


class Measured(NamedTuple):
    """The parts of a profile, and the pairs that ranks held together, and apart."""

    parts: Profile
    together: Sequence[PairTime]
    apart: Sequence[PairTime] = ()


def composed(measured: Measured, machine: HardwareConfig) -> Profile:
    """Complete the profile of a machine by its pairs.

    Operators, linear layers and messages timed one by one do not add up to a forward: there each one finds colder
    caches, or ranks that are already waiting. The first draft forward of a round takes longer than the others, since
    the target has taken the draft's weights and code out of the processor's caches.
    """
    host_s = statistics.median(time.other_s for time in measured.together)
    bare = replace(measured.parts, forward_ratio=1.0, forward_ratio_apart=1.0, first_draft_s=0.0, round_s=host_s)
    machine, num_ranks = machine_of_run(replace(machine, profiles=[bare]), bare.num_ranks), bare.num_ranks
    ratio = _forward_ratio(measured.together, machine, num_ranks=num_ranks)
    apart = _forward_ratio(measured.apart, machine, num_ranks=num_ranks, apart=True) if measured.apart else ratio
    whole = replace(bare, forward_ratio=ratio, forward_ratio_apart=apart)
    machine = replace(machine, profiles=[whole])
    more_s = [
        time.draft_s - CostModel(_job(time, num_ranks), machine).drafting_s(NUM_DRAFT_TOKENS)
        for time in measured.together
    ]
    return replace(whole, first_draft_s=max(statistics.mean(more_s), 0.0))


def _forward_ratio(times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int, apart: bool = False) -> float:
    """The median ratio of measured forwards, of one token and of a round, to their forecast by parts.

    Everything else that a pair does takes as long as forecast. `num_ranks` shared the targets, or had one each.
    """
    ratios = []
    for time in times:
        costs = CostModel(_job(time, num_ranks, apart=apart), machine)
        plain_s, verify_s = (costs.forward(costs.target, num).total_s for num in (1, NUM_DRAFT_TOKENS + 1))
        ratios.append((time.plain_s - costs.plain_s() + plain_s) / plain_s)
        ratios.append((time.verify_s - costs.verdict_s(NUM_DRAFT_TOKENS)) / verify_s)
    return max(statistics.median(ratios), LEAST_RATIO)


def _job(time: PairTime, num_ranks: int, *, apart: bool = False) -> PlanSpec:
    num_replicas = num_ranks if apart else 1
    return PlanSpec(
        target=time.target.planned, target_kind=TargetKind.tensor, target_ranks=tuple(range(num_ranks // num_replicas)),
        num_replicas=num_replicas,
        draft=model_pairs.DRAFT.planned, draft_kind=DraftLayout.one_rank, draft_ranks=(0,),
        num_draft_tokens=NUM_DRAFT_TOKENS, acceptance=None, batch_size=1, prompt_tokens=model_pairs.PROMPT_TOKENS,
        max_new_tokens=model_pairs.NEW_TOKENS, cuda_graphs=False, device="cpu",
    )  # fmt: skip


def measure(world: World, parts: Parts, show: Show) -> list[Measured]:
    """Measure rank 0 alone with all cores, and all ranks together: with pairs cut over them, and with one for each.

    All ranks must call this together; rank 0 returns what was measured, the others nothing.
    """
    comm, all_ranks = world.comm, world.comm.size
    found, alone, shared = dict[int, Profile](), list[Pairs](), list[Pairs]()
    with rank_0_alone(world) as is_alone:
        if is_alone:
            found[1] = parts(1, "1 rank, all cores")
    if all_ranks > 1:
        found[all_ranks] = parts(all_ranks, f"{all_ranks} ranks")
    with rank_0_alone(world) as is_alone:
        if is_alone:
            alone = [Pairs(Comm.single())]
    if all_ranks > 1:
        shared = [Pairs(comm), Pairs(comm, apart=True)]
    for done in range(NUM_TURNS):
        show("whole forwards", done, NUM_TURNS)
        with rank_0_alone(world):
            for pairs in alone:
                pairs.turn()
        for pairs in shared:
            pairs.turn()
    show("whole forwards", NUM_TURNS, NUM_TURNS)
    times = [[pairs.times() for pairs in of_ranks] for of_ranks in (alone, shared)]
    return [Measured(profile, *of_ranks) for profile, of_ranks in zip(found.values(), times, strict=False) if alone]


@contextmanager
def rank_0_alone(world: World) -> Iterator[bool]:
    """A block in which rank 0 has all cores, while the others wait for its end; says whether this rank is rank 0.

    On a CPU rank 0 has the cores and threads of a run of one rank there.
    """
    is_alone, threads = world.comm.rank == 0, torch.get_num_threads()
    if is_alone and world.device.type == "cpu" and world.comm.size > 1:
        try:
            with on_all_cores(world.cores):
                torch.set_num_threads(len(world.cores))
                yield is_alone
        finally:
            torch.set_num_threads(threads)
    else:
        yield is_alone
    world.comm.barrier()


def all_parts(num_ranks: int, name: str, *, reduces: Sequence[SizePoint], show: Show) -> Profile:
    """Measure everything except whole pairs; `reduces` are the messages of several ranks."""
    sets, linear = (*operators.WORKING_SETS, operators.beyond_caches()), list[LinearPoint]()
    kinds: list[dict[str, Any]] = [{"name": Dtype.fp32.name}]
    if can_halve():
        kinds.append({"name": Dtype.fp16.name, "from_16_bits": True})
    kinds += (
        {"name": format_name, "quantization": format_name, "is_brief": True}
        for format_name, kind in COMPILED.items()
        if product_of(kind)
    )
    # Runs use 16-bit arithmetic only on request.
    few = {"working_sets": operators.WORKING_SETS[1:], "is_brief": True}
    kinds += ({"name": dtype.name, "arithmetic": dtype, **few} for dtype in (Dtype.bf16, Dtype.fp16))
    num_steps = len(kinds) + 3

    def step(done: int) -> None:
        show(f"{name}: parts", done, num_steps)

    for number, kind in enumerate(kinds):
        step(number)
        linear += operators.linear_points(**{"working_sets": sets, **kind})
    step(num_steps - 3)
    fp32 = [point for point in linear if point.dtype == Dtype.fp32.name]
    layer, frame = operators.operator_points(fp32)
    step(num_steps - 2)
    attention = operators.attention_points()
    step(num_steps - 1)
    draw, verify = operators.rule_points()
    profile = Profile(
        num_ranks=num_ranks,
        linear=linear,
        tied_head=operators.linear_points(Dtype.fp32.name, sets[:1], keeps_weight=True),
        layer=layer,
        frame=frame,
        attention=attention,
        draw=draw,
        verify=verify,
        all_reduce=[*reduces] if num_ranks > 1 else [],
    )
    step(num_steps)
    return profile
