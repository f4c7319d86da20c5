"""Measures the profiles of a CPU for `task=calibrate`: of rank 0 alone with all cores, and of all ranks together.

A profile is made of parts (operators, messages, the rule) and of how whole pairs of models compare with their sum. The
pairs decode last, and those of all profiles in the same turns: a shared machine is faster in one minute than in
another, and plans compare numbers of ranks.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import NamedTuple, TypeAlias

import torch

from llama_ssp.kernels.linear import COMPILED, can_halve, product_of
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import machine_of_run
from llama_ssp.machines.profile import Profile, SizePoint
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel
from llama_ssp.ranks.comms import Comm
from llama_ssp.ranks.world import World, on_all_cores
from llama_ssp.run.calibration import operators, rounds
from llama_ssp.run.calibration.model_pairs import NEW_TOKENS, NUM_DRAFT_TOKENS, PROMPT_TOKENS, Pairs, PairTime
from llama_ssp.settings.schema import DraftLayout, Dtype, TargetKind

DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16}
NUM_PARTS = 6 + len(COMPILED)
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
    together: list[PairTime]
    apart: list[PairTime]

    def composed(self, machine: HardwareConfig) -> Profile:
        """The whole profile of a machine, with the ratios of its pairs to the planner's sum of their parts."""
        return composed(self.parts, machine, self.together, self.apart)


def composed(
    profile: Profile, machine: HardwareConfig, together: Sequence[PairTime], apart: Sequence[PairTime] = ()
) -> Profile:
    """Complete the profile of a machine by pairs that its ranks held together, and apart.

    Operators, linear layers and messages timed one by one do not add up to a forward: there each one finds colder
    caches, or ranks that are already waiting. The first draft forward of a round takes longer than the others, since
    the target has taken the draft's weights and code out of the processor's caches.
    """
    bare = replace(profile, forward_ratio=1.0, forward_ratio_apart=1.0, first_draft_s=0.0)
    machine = machine_of_run(replace(machine, profiles=[bare]), profile.num_ranks)
    ratio = forward_ratio(together, machine, num_ranks=profile.num_ranks)
    apart_ratio = forward_ratio(apart, machine, num_ranks=profile.num_ranks, apart=True) if apart else ratio
    whole = replace(bare, forward_ratio=ratio, forward_ratio_apart=apart_ratio)
    machine, more_s = replace(machine, profiles=[whole]), list[float]()
    for time in together:
        costs = CostModel(_job(time, profile.num_ranks), machine)
        more_s += [found.draft_s - costs.drafting_s(number) for number, found in time.rounds.items()]
    return replace(whole, first_draft_s=max(statistics.mean(more_s), 0.0))


def forward_ratio(times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int, apart: bool = False) -> float:
    """The median ratio of measured forwards, of one token and of a round, to their forecast by parts.

    Everything else that a pair does takes as long as forecast. `num_ranks` shared the targets, or had one each.
    """
    ratios = []
    for time in times:
        costs = CostModel(_job(time, num_ranks, apart=apart), machine)
        plain_s = costs.forward(costs.target, 1).total_s
        ratios.append((time.plain_s - costs.plain_s() + plain_s) / plain_s)
        for number, found in time.rounds.items():
            verify_s = costs.forward(costs.target, number + 1).total_s
            ratios.append((found.rest_s - costs.verdict_s(number) - costs.host_s) / verify_s)
    return max(statistics.median(ratios), LEAST_RATIO)


def _job(time: PairTime, num_ranks: int, *, apart: bool = False) -> PlanSpec:
    num_replicas = num_ranks if apart else 1
    return PlanSpec(
        target=time.target.planned, target_kind=TargetKind.tensor, target_ranks=tuple(range(num_ranks // num_replicas)),
        num_replicas=num_replicas,
        draft=time.draft.planned, draft_kind=DraftLayout.one_rank, draft_ranks=(0,),
        num_draft_tokens=NUM_DRAFT_TOKENS, acceptance=None, batch_size=1, prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS, cuda_graphs=False, device="cpu",
    )  # fmt: skip


def measure(world: World, parts: Parts, show: Show) -> list[Measured]:
    """Measure rank 0 alone with all cores, and all ranks together: with pairs cut over them, and with one for each.

    All ranks must call this together; rank 0 returns what was measured, the others nothing.
    """
    comm, all_ranks = world.comm, world.comm.size
    found, shared = dict[int, Profile](), list[Pairs]()
    with _rank_0_alone(world) as is_alone:
        if is_alone:
            found[1] = parts(1, "1 rank, all cores")
    if all_ranks > 1:
        found[all_ranks] = parts(all_ranks, f"{all_ranks} ranks")
    with _rank_0_alone(world) as is_alone:
        alone = Pairs(Comm.single()) if is_alone else None
    if all_ranks > 1:
        shared = [Pairs(comm), Pairs(comm, apart=True)]
    for done in range(NUM_TURNS):
        show("whole forwards", done, NUM_TURNS)
        with _rank_0_alone(world):
            if alone:
                alone.turn()
        for pairs in shared:
            pairs.turn()
    show("whole forwards", NUM_TURNS, NUM_TURNS)
    if not alone:
        return []
    times = {1: [alone.times(), []]} | ({all_ranks: [pairs.times() for pairs in shared]} if shared else {})
    return [Measured(profile, *times[number]) for number, profile in found.items()]


@contextmanager
def _rank_0_alone(world: World) -> Iterator[bool]:
    """A block in which rank 0 has all cores, while the others wait for its end; says whether this rank is rank 0."""
    is_alone = world.comm.rank == 0
    if is_alone:
        with all_cores(world):
            yield is_alone
    else:
        yield is_alone
    world.comm.barrier()


@contextmanager
def all_cores(world: World) -> Iterator[None]:
    """Give rank 0 the cores and threads of a run of one rank."""
    if world.device.type != "cpu" or world.comm.size == 1:
        yield
        return
    threads = torch.get_num_threads()
    try:
        with on_all_cores(world.cores):
            torch.set_num_threads(len(world.cores))
            yield
    finally:
        torch.set_num_threads(threads)


def all_parts(num_ranks: int, name: str, *, reduces: Sequence[SizePoint], show: Show) -> Profile:
    """Measure everything except whole pairs; `reduces` are the messages of several ranks."""
    done = count()

    def step() -> None:
        show(f"{name}: parts", next(done), NUM_PARTS)

    sets = (*operators.WORKING_SETS, operators.beyond_caches())
    step()
    linear = operators.linear_points(torch.float32, Dtype.fp32.name, working_sets=sets)
    step()
    halves = []
    if can_halve():
        halves = operators.linear_points(torch.float32, Dtype.fp16.name, working_sets=sets, from_16_bits=True)
    step()
    elements, rows = operators.FEW_ELEMENTS, operators.FEW_ROWS
    for format_name, kind in COMPILED.items():
        if product_of(kind):
            halves += operators.linear_points(
                torch.float32, format_name, working_sets=sets, quantization=format_name, all_elements=elements,
                all_rows=rows,
            )  # fmt: skip
        step()
    for dtype in (Dtype.bf16, Dtype.fp16):  # few points, since runs use 16-bit arithmetic only on request
        halves += operators.linear_points(
            DTYPES[dtype], dtype.name, working_sets=operators.WORKING_SETS[1:], all_elements=elements, all_rows=rows
        )
    step()
    layer, frame = operators.operator_points(linear, rounds.some_draw())
    step()
    attention = operators.attention_points()
    step()
    draw, verify = rounds.rule_points(operators.some_forward())
    profile = Profile(
        num_ranks=num_ranks,
        linear=linear + halves,
        tied_head=operators.linear_points(
            torch.float32, Dtype.fp32.name, working_sets=operators.WORKING_SETS[:1], keeps_weight=True
        ),
        layer=layer,
        frame=frame,
        attention=attention,
        draw=draw,
        verify=verify,
        all_reduce=[*reduces] if num_ranks > 1 else [],
        round_s=rounds.round_s(),
    )
    step()
    return profile
