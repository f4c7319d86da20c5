"""Pairs that were timed give the constants that forecast them again."""

from dataclasses import replace

import pytest

from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.machines.machine import machine_of_run
from llama_ssp.machines.profile import LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.planning.timing import CostModel
from llama_ssp.run.calibration import model_pairs, profiles
from llama_ssp.run.calibration.model_pairs import PairTime, RoundTime
from llama_ssp.run.calibration.random_llama import RandomLlama

SMALL, LARGE = RandomLlama(128, 2, 64, from_16_bits=True), RandomLlama(128, 4, 64)


def _machine(num_ranks: int, **constants: float) -> HardwareConfig:
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
        round_s=2e-5, **constants,
    )  # fmt: skip
    return replace(hardware.load("laptop_cpu"), profiles=[profile])


def _forecast(target: RandomLlama, machine: HardwareConfig, num_ranks: int, *, apart: bool = False) -> PairTime:
    """What a machine would take for a pair."""
    pair = PairTime(target=target, draft=model_pairs.DRAFT, prompt_s=1.0, plain_s=1.0, rounds={})
    clock = CostModel(profiles._job(pair, num_ranks, apart=apart), machine_of_run(machine, num_ranks))
    rounds = {n: RoundTime(clock.drafting_s(n), clock.verify_s(n) + clock.host_s) for n in (1, 4)}
    return replace(pair, plain_s=clock.plain_s(), rounds=rounds)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_constants_of_a_machine_are_found_from_what_it_takes_for_pairs(num_ranks: int) -> None:
    constants = {"forward_ratio": 1.5, "forward_ratio_apart": 1.5 if num_ranks == 1 else 2.5, "first_draft_s": 3e-4}
    true, bare = _machine(num_ranks, **constants), _machine(num_ranks)
    together = [_forecast(target, true, num_ranks) for target in (SMALL, LARGE)]
    apart = [_forecast(target, true, num_ranks, apart=True) for target in (SMALL, LARGE)] if num_ranks > 1 else []
    found = profiles.composed(bare.profiles[0], bare, together, apart)
    assert {name: getattr(found, name) for name in constants} == pytest.approx(constants)
    again = profiles.composed(true.profiles[0], bare, together, apart)
    assert {name: getattr(again, name) for name in constants} == pytest.approx(constants), "a refresh starts anew"


def test_times_that_cannot_be_leave_a_forward_some_time() -> None:
    machine = _machine(1)
    pair = PairTime(
        target=SMALL, draft=model_pairs.DRAFT, prompt_s=1.0, plain_s=1e-9, rounds={4: RoundTime(1e-9, 1e-9)}
    )  # fmt: skip
    found = profiles.composed(machine.profiles[0], machine, [pair])
    assert (found.forward_ratio, found.first_draft_s) == (profiles.LEAST_RATIO, 0.0)
