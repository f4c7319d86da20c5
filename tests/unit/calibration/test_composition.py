"""Forecasts made with timed pairs give back what was timed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from llama_ssp.calibration import composition, model_pairs
from llama_ssp.calibration.model_pairs import PairTime, RoundTime
from llama_ssp.calibration.random_llama import RandomLlama
from llama_ssp.config.machines import hardware
from llama_ssp.config.machines.hardware import HardwareConfig
from llama_ssp.config.machines.machine import machine_of_run
from llama_ssp.config.machines.profile import CompositionPoint, LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.planning.costs import CostModel
from llama_ssp.planning.roofline import working_set_bytes
from llama_ssp.planning.timing import timing

SMALL, LARGE = RandomLlama(128, 2, 64, from_16_bits=True), RandomLlama(128, 4, 64)
RATIOS = {1: 1.25, 2: 2.0, 5: 1.5, 32: 0.75}
FIRST_S = (2e-4, 3e-4, 5e-4)
LENGTHS = (0, 1, 4)


def _machine(num_ranks: int) -> HardwareConfig:
    """A CPU whose parts take round figures."""
    linear = [
        LinearPoint(dtype=dtype, rows=rows, elements=elements, working_set_bytes=1, s=rows * elements * 1e-9)
        for dtype in ("fp32", "fp16")
        for rows in (1, 64)
        for elements in (1000, 100_000)
    ]
    flat = [SizePoint(size=1, s=3e-5), SizePoint(size=1000, s=3e-5)]
    layer = [RowsPoint(rows=1, width=64, s=1e-4), RowsPoint(rows=64, width=64, s=2e-4)]
    profile = Profile(
        num_ranks=num_ranks, linear=linear, tied_head=linear, layer=layer, frame=layer,
        attention=[SizePoint(size=1, s=1e-15)], draw=flat, verify=flat, all_reduce=flat if num_ranks > 1 else [],
        round_s=2e-5,
    )  # fmt: skip
    return replace(hardware.load("laptop_cpu"), profiles=[profile])


def _with(machine: HardwareConfig, **measured: list[CompositionPoint] | list[SizePoint]) -> HardwareConfig:
    (profile,) = machine.profiles
    return replace(machine, profiles=[replace(profile, **measured)])  # type: ignore[arg-type]


def _blank(target: RandomLlama) -> PairTime:
    rounds = {number: RoundTime(float(number), 1.0) for number in LENGTHS[1:]}
    return PairTime(target=target, draft=model_pairs.DRAFT, prompt_s=1.0, plain_s=1.0, rounds=rounds)


def _forecast(pair: PairTime, machine: HardwareConfig, num_ranks: int, *, apart: bool = False) -> PairTime:
    """What a machine would take for a pair."""
    job = composition._job(pair, num_ranks, apart=apart)
    clock = CostModel(job, machine_of_run(machine, num_ranks))
    timed = timing(job, clock.hardware)
    draw_s = clock.plain_s() - clock.forward(clock.target, 1).total_s
    rounds = {
        number: RoundTime(clock.drafting_s(number), clock.verify_s(number) + clock.host_s) for number in LENGTHS[1:]
    }
    assert timed.round_s == pytest.approx(sum(rounds[4]))
    return replace(pair, prompt_s=clock.prefill_s(clock.target) + draw_s, plain_s=timed.plain_s, rounds=rounds)


def _seconds(pair: PairTime) -> tuple[float, ...]:
    return pair.prompt_s, pair.plain_s, *(part_s for found in pair.rounds.values() for part_s in found)


@pytest.mark.parametrize(("num_ranks", "apart"), [(1, False), (2, False), (2, True)])
def test_forecasts_with_measured_wholes_give_back_what_was_measured(num_ranks: int, apart: bool) -> None:
    bare, pairs = _machine(num_ranks), [_blank(target) for target in model_pairs.TARGETS]
    clocks = [
        CostModel(composition._job(pair, num_ranks, apart=apart), machine_of_run(bare, num_ranks)) for pair in pairs
    ]
    assert clocks[0].draft
    true = [CompositionPoint(rows=1, working_set_bytes=working_set_bytes(clocks[0].draft, bare), ratio=2.0)]
    for clock in clocks:
        assert clock.target.ranks == tuple(range(1 if apart else num_ranks))
        assert clock.target.num_active == num_ranks
        size = working_set_bytes(clock.target, bare)
        true += [CompositionPoint(rows=rows, working_set_bytes=size, ratio=ratio) for rows, ratio in RATIOS.items()]
    name = "composition_apart" if apart else "composition"
    took = [_forecast(pair, _with(bare, **{name: true}), num_ranks, apart=apart) for pair in pairs]
    found = composition.composition_points(took, machine_of_run(bare, num_ranks), num_ranks=num_ranks, apart=apart)
    assert [replace(point, ratio=0) for point in found] == [replace(point, ratio=0) for point in true]
    assert [point.ratio for point in found] == pytest.approx([point.ratio for point in true])
    for pair in took:
        again = _forecast(pair, _with(bare, **{name: found}), num_ranks, apart=apart)
        assert _seconds(again) == pytest.approx(_seconds(pair))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_first_draft_step_takes_longer_behind_a_larger_target(num_ranks: int) -> None:
    bare, pairs = _machine(num_ranks), [_blank(target) for target in model_pairs.TARGETS]
    clocks = [CostModel(composition._job(pair, num_ranks), machine_of_run(bare, num_ranks)) for pair in pairs]
    sizes = [working_set_bytes(clock.target, clock.hardware) for clock in clocks]
    first = [SizePoint(size=size, s=more_s) for size, more_s in zip(sizes, FIRST_S, strict=True)]
    true = _with(bare, first_draft=first)
    for clock, pair, more_s in zip(clocks, pairs, FIRST_S, strict=True):
        slow = CostModel(clock.job, machine_of_run(true, num_ranks))
        assert [slow.drafting_s(number) - clock.drafting_s(number) for number in LENGTHS] == pytest.approx(
            [0.0, more_s, more_s]
        ), pair.target
    took = [_forecast(pair, true, num_ranks) for pair in pairs]
    (profile,) = bare.profiles
    found = composition.composed(replace(profile, first_draft=first[:1]), bare, took)
    assert [point.s for point in found.first_draft] == pytest.approx(FIRST_S)
    for pair in took:
        again = _forecast(pair, replace(bare, profiles=[found]), num_ranks)
        assert _seconds(again) == pytest.approx(_seconds(pair))


def test_a_first_draft_step_as_short_as_the_others_is_no_problem_of_the_file() -> None:
    pair = replace(_blank(SMALL), rounds={1: RoundTime(1e-9, 1.0), 4: RoundTime(4.0, 1.0)})
    (profile,) = _machine(1).profiles
    assert [point.s for point in composition.composed(profile, _machine(1), [pair]).first_draft] == [
        composition.LEAST_S
    ]


def test_a_whole_that_took_less_than_what_is_beside_its_forwards_is_no_problem_of_the_file() -> None:
    points = composition.composition_points([replace(_blank(SMALL), plain_s=1e-9)], _machine(1), num_ranks=1)
    assert points[1].ratio == composition.LEAST_RATIO


def test_the_spread_of_a_profile_is_that_of_its_pairs() -> None:
    together, apart = ([replace(_blank(each), spread=spread) for each in (SMALL, LARGE)] for spread in (0.3, 0.4))
    (profile,) = _machine(2).profiles
    found = composition.composed(profile, _machine(2), together, apart)
    assert found.spread == pytest.approx((0.125) ** 0.5)


def test_the_sizes_that_are_timed_lie_apart_and_end_within_the_measured_slots() -> None:
    clocks = [CostModel(composition._job(_blank(target), 1), _machine(1)) for target in model_pairs.TARGETS]
    assert clocks[0].draft
    sizes = [working_set_bytes(seat, clocks[0].hardware) for seat in (clocks[0].draft, *[c.target for c in clocks])]
    assert all(later > 4 * earlier for earlier, later in pairwise(sizes))
    assert {clock.forward(clock.target, 5).attention_s for clock in clocks} == {0.0}


def test_only_a_model_that_no_rank_shares_takes_what_was_measured_apart() -> None:
    whole, half = (CompositionPoint(rows=1, working_set_bytes=1, ratio=ratio) for ratio in (2.0, 0.5))
    bare, pair = _machine(2), _blank(LARGE)
    machine = _with(bare, composition=[half], composition_apart=[whole])
    for apart, ratio in ((True, 2.0), (False, 0.5)):
        before, after = (
            CostModel(composition._job(pair, 2, apart=apart), machine_of_run(each, 2)) for each in (bare, machine)
        )
        times = [clock.forward(clock.target, 1).total_s for clock in (before, after)]
        assert times[1] == pytest.approx(ratio * times[0])
