"""A curve through measured points says whether a quadratic term was seen, was not, or cannot be told."""

import random

import pytest

from benchmarks.curves import fit

PLACES = range(50, 2000, 150)


def points(*, quadratic: float = 0.0, noise: float = 0.0) -> list[tuple[float, float]]:
    """1 + 0.0005 n + quadratic n^2, each value off by a part of itself."""
    chance = random.Random(0)
    return [(n, (1 + 5e-4 * n + quadratic * n * n) * (1 + noise * chance.gauss(0, 1))) for n in PLACES]


def test_the_coefficients_of_an_exact_curve_are_found() -> None:
    curve = fit(points(quadratic=1e-7))
    assert (curve.a, curve.b, curve.c) == pytest.approx((1, 5e-4, 1e-7))
    assert curve.at(1000) == pytest.approx(1.6)
    assert curve.growth == pytest.approx(curve.at(PLACES[-1]) - 1)
    assert curve.c_within < 1e-12


def test_a_straight_line_has_no_quadratic_term() -> None:
    curve = fit(points(noise=0.005))
    assert abs(curve.share) < curve.share_within
    assert curve.verdict.startswith("no quadratic term")


def test_a_quadratic_term_is_seen_through_noise() -> None:
    assert fit(points(quadratic=2e-7, noise=0.005)).verdict.startswith("a quadratic term: +")


def test_points_that_scatter_too_much_say_nothing() -> None:
    assert fit(points(noise=0.3)).verdict.startswith("too noisy to say")


def test_the_interval_holds_the_truth_in_19_of_20_cases() -> None:
    """A miss in 30 or more of 300 at 5 % has a chance of 4e-4; an interval of half the width misses a third."""
    misses = 0
    for seed in range(300):
        chance = random.Random(seed)
        curve = fit([(n, 1 + 5e-4 * n + chance.gauss(0, 0.01)) for n in PLACES])
        misses += abs(curve.c) > curve.c_within
    assert misses < 30
