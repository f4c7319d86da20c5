"""Compares whole pairs with the planner's sum of their parts, for `task=calibrate`.

Operators, linear layers and messages timed one by one do not add up to a forward: there each one finds colder caches,
or ranks that are already waiting. `Profile.composition` holds the ratio of forwards timed in the decoding loop to the
planner's sum of parts. Where ranks hold models of their own (replicas, or a draft on ranks of its own) no messages are
sent inside of a forward, but they share the machine's memory: `Profile.composition_apart`.

The first draft forward of a round takes longer than the others, since the target's forward before it has taken the
draft's weights and code out of the processor's caches: `Profile.first_draft`. Rounds of two lengths tell them apart.

Shapes: K drafted tokens.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from llama_ssp.calibration.model_pairs import FEWEST, NEW_TOKENS, NUM_DRAFT_TOKENS, PROMPT_TOKENS, PairTime
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.machines.machine import machine_of_run
from llama_ssp.config.machines.profile import CompositionPoint, Profile, SizePoint
from llama_ssp.config.schema import DraftLayout, TargetKind
from llama_ssp.planning.costs import CostModel
from llama_ssp.planning.roofline import ModelPlacement, working_set_bytes
from llama_ssp.planning.spec import PlanSpec

LEAST_RATIO, LEAST_S = 0.1, 1e-9


def composed(
    profile: Profile, machine: HardwareConfig, together: Sequence[PairTime], apart: Sequence[PairTime] = ()
) -> Profile:
    """Complete the profile of a machine by pairs that its ranks held together, and apart."""
    parts = replace(profile, composition=[], composition_apart=[], first_draft=[])
    bare = machine_of_run(replace(machine, profiles=[parts]), profile.num_ranks)
    whole = replace(
        parts,
        composition=composition_points(together, bare, num_ranks=profile.num_ranks),
        composition_apart=composition_points(apart, bare, num_ranks=profile.num_ranks, apart=True),
    )
    first = _first_draft(together, replace(bare, profiles=[whole]), num_ranks=profile.num_ranks)
    spreads = [time.spread for time in (*together, *apart)]
    return replace(whole, first_draft=first, spread=math.hypot(*spreads) / math.sqrt(len(spreads) or 1))


def composition_points(
    times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int, apart: bool = False
) -> list[CompositionPoint]:
    """Compare measured pairs with the forecast for a machine whose profiles have no composition points.

    The forecast of everything except forwards is taken as exact; the rest of the measured time belongs to forwards. The
    first point is the draft's: a step of it that is not the first of a round, as the pairs agree on it. `num_ranks`
    shared the targets, or had one each (`apart`).
    """
    points = []
    for time in times:
        costs = CostModel(_job(time, num_ranks, apart=apart), machine)
        assert costs.draft, "a pair has a draft"
        if time is times[0]:
            draft_s = costs.forward(costs.draft, 1).total_s
            step_s = _later_step_s(times) - (costs.draft_step_s(1) - draft_s)
            points.append(_point(costs, costs.draft, 1, step_s, draft_s))
        plain_s = costs.forward(costs.target, 1).total_s
        draw_s = costs.plain_s() - plain_s
        points.append(_point(costs, costs.target, 1, time.plain_s - draw_s, plain_s))
        for number, found in sorted(time.rounds.items()):
            rest_s = found.rest_s - costs.verdict_s(number) - costs.host_s
            verify_s = costs.forward(costs.target, number + 1).total_s
            points.append(_point(costs, costs.target, number + 1, rest_s, verify_s))
        prompt_s = costs.prefill_s(costs.target)
        points.append(_point(costs, costs.target, PROMPT_TOKENS, time.prompt_s - draw_s, prompt_s))
    return points


def _later_step_s(times: Sequence[PairTime]) -> float:
    """Time of a draft step, its draw included, from rounds of two lengths: only the shorter has none but the first."""
    more = NUM_DRAFT_TOKENS - FEWEST
    steps = [(time.rounds[NUM_DRAFT_TOKENS].draft_s - time.rounds[FEWEST].draft_s) / more for time in times]
    return statistics.median(steps)


def _first_draft(times: Sequence[PairTime], machine: HardwareConfig, *, num_ranks: int) -> list[SizePoint]:
    """How much longer drafting takes than its steps, by the size of what the target has read before."""
    points = []
    for time in times:
        costs = CostModel(_job(time, num_ranks), machine)
        more_s = statistics.mean(found.draft_s - costs.drafting_s(number) for number, found in time.rounds.items())
        points.append(SizePoint(size=working_set_bytes(costs.target, machine), s=max(more_s, LEAST_S)))
    return points


def _point(
    costs: CostModel, placement: ModelPlacement, rows: int, measured_s: float, parts_s: float
) -> CompositionPoint:
    ratio = max(measured_s / parts_s, LEAST_RATIO)
    return CompositionPoint(rows=rows, working_set_bytes=working_set_bytes(placement, costs.hardware), ratio=ratio)


def _job(time: PairTime, num_ranks: int, *, apart: bool = False) -> PlanSpec:
    num_replicas = num_ranks if apart else 1
    return PlanSpec(
        target=time.target.planned, target_kind=TargetKind.tensor, target_ranks=tuple(range(num_ranks // num_replicas)),
        num_replicas=num_replicas,
        draft=time.draft.planned, draft_kind=DraftLayout.one_rank, draft_ranks=(0,),
        num_draft_tokens=NUM_DRAFT_TOKENS, acceptance=None, batch_size=1, prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS, cuda_graphs=False, device="cpu",
    )  # fmt: skip
