"""The error of times, by what is known of a machine."""

from dataclasses import asdict, replace

import pytest

from llama_ssp.config.machines import hardware
from llama_ssp.config.machines.hardware import HardwareConfig, problems_of
from llama_ssp.config.machines.profile import Profile
from llama_ssp.planning.time_error import TURNS_QUANTILE, time_error


def _calibrated(**spreads: float) -> HardwareConfig:
    profiles = [
        Profile(
            num_ranks=int(name[1:]),
            linear=[],
            tied_head=[],
            layer=[],
            frame=[],
            attention=[],
            draw=[],
            verify=[],
            spread=spread,
        )
        for name, spread in spreads.items()
    ]
    return replace(hardware.load("laptop_cpu"), profiles=profiles)


def test_times_stand_on_data_sheets_until_a_gpu_is_calibrated() -> None:
    described = hardware.load("8xa100_80gb")
    error = time_error(described, 8)
    assert error
    low, high = error.ends(1.0)
    assert 0.8 < low < 1 < high < 1.4
    assert time_error(replace(described, sources={"all": "measured by task=calibrate on host"}), 8) is None
    assert time_error(hardware.load("laptop_cpu"), 1) is None


def test_a_calibrated_cpu_has_the_spread_of_the_profile_that_applies() -> None:
    machine = _calibrated(n1=0.1, n2=0.2)
    for num_active, spread in ((1, 0.1), (2, 0.2), (3, 0.2)):
        error = time_error(machine, num_active)
        assert error
        low, high = error.ends(5.0)
        assert low * high == pytest.approx(25.0)
        assert high / 5.0 == pytest.approx(2.718281828 ** (TURNS_QUANTILE * spread))


def test_a_profile_of_an_earlier_calibration_has_no_range() -> None:
    machine = _calibrated(n1=0.0)
    assert time_error(machine, 1) is None
    assert problems_of(asdict(machine)) == [], "a machine may be as fast in all turns"
