"""Intervals cover what they should, and tests keep their rates of false alarms; all draws are seeded.

A simulation of 1000 tests at a rate of 10 % counts 100 false alarms on average, with a standard deviation of 9.5: the
limit of 135 would be passed with probability 2e-4 by a correct test, and always by one whose true rate is 20 %.
"""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from llama_ssp.extensions.evaluate.statistics import (
    PairedGroup,
    count_statistic,
    mean_interval,
    mean_statistic,
    p_value,
    rate_difference,
    swaps,
    total_variation,
    wilson,
)

Make = Callable[[Sequence[PairedGroup], Sequence[NDArray[Any]]], NDArray[Any]]
NUM_TESTS, RATE, MOST_ALARMS = 1000, 0.1, 135


def group(
    draw: random.Random, size: int, first: Sequence[float], second: Sequence[float], *, shift: float = 0.0
) -> PairedGroup:
    """Pairs whose members have two laws over a few symbols, two columns of them, and normal differences."""
    columns = []
    for _ in range(2):
        sides = [draw.choices(range(len(law)), law, k=size) for law in (first, second)]
        columns.append(list(zip(*sides, strict=True)))
    return PairedGroup(columns=columns, differences=[draw.gauss(shift, 1) for _ in range(size)])


@pytest.mark.parametrize(("num_right", "num_tried"), [(0, 10), (3, 10), (10, 10), (450, 1000), (1, 1)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_of_a_rate_is_wilsons(num_right: int, num_tried: int, confidence: float) -> None:
    wanted = stats.binomtest(num_right, num_tried).proportion_ci(confidence_level=confidence, method="wilson")
    assert wilson(num_right, num_tried, confidence=confidence) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_the_difference_of_two_rates_of_equal_outcomes_still_has_an_interval() -> None:
    low, high = rate_difference(0, 0, 1000)
    assert low == pytest.approx(-high)
    assert 0 < high < 0.003


@pytest.mark.parametrize("laws", [(0.3, 0.3, 0.2, 0.2), (0.01, 0.01, 0.5, 0.48), (0.3, 0.1, 0.3, 0.3)])
def test_the_interval_of_a_difference_covers_it_as_often_as_it_says(laws: tuple[float, ...]) -> None:
    draw, num_covered = random.Random(1), 0
    for _ in range(NUM_TESTS):
        outcomes = draw.choices(range(4), laws, k=100)
        low, high = rate_difference(outcomes.count(0), outcomes.count(1), 100, confidence=1 - RATE)
        num_covered += low <= laws[1] - laws[0] <= high
    assert num_covered >= NUM_TESTS - MOST_ALARMS


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    draw, num_covered = random.Random(2), 0
    for _ in range(NUM_TESTS):
        groups = [[draw.gauss(mean, 1 + mean) for _ in range(30)] for mean in (0, 2)]
        low, high = mean_interval(groups, confidence=1 - RATE)
        num_covered += low <= 1 <= high
    assert num_covered >= NUM_TESTS - MOST_ALARMS


def test_the_counts_are_compared_as_by_a_chi_square_test() -> None:
    first, second = [0] * 30 + [1] * 10 + [2] * 20, [0] * 20 + [1] * 25 + [2] * 15
    random.Random(0).shuffle(second)
    pairs = PairedGroup(columns=[list(zip(first, second, strict=True))], differences=[0.0] * 60)
    wanted = stats.chi2_contingency([[30, 10, 20], [20, 25, 15]], correction=False).statistic
    assert count_statistic([pairs], [np.ones((1, 60))]) == pytest.approx(wanted)


@pytest.mark.parametrize("make", [count_statistic, mean_statistic])
def test_a_statistic_of_swapped_pairs_is_that_of_the_swapped_samples(make: Make) -> None:
    pairs = group(random.Random(3), 40, [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], shift=0.5)
    [[none, *signs]] = swaps([pairs], num_swaps=4, seed=0)
    assert none.tolist() == [1.0] * 40
    for sign in signs:
        swapped = PairedGroup(
            columns=[
                [(a, b) if kept > 0 else (b, a) for (a, b), kept in zip(column, sign, strict=True)]
                for column in pairs.columns
            ],
            differences=[value * kept for value, kept in zip(pairs.differences, sign, strict=True)],
        )
        assert make([pairs], [sign[None]]) == pytest.approx(make([swapped], [none[None]]))


def test_the_p_value_is_that_of_all_swaps() -> None:
    pairs = group(random.Random(5), 8, [0.5, 0.5], [0.5, 0.5], shift=0.6)
    every = mean_statistic([pairs], [np.array([*product([1.0, -1.0], repeat=8)])])
    found = p_value(mean_statistic([pairs], swaps([pairs], num_swaps=20_000, seed=0)))
    assert found == pytest.approx(p_value(every), abs=0.015)  # 4 standard errors


def test_no_p_value_is_zero() -> None:
    pairs = group(random.Random(6), 60, [1.0, 0.0], [0.0, 1.0])
    assert p_value(count_statistic([pairs], swaps([pairs], num_swaps=99, seed=0))) == 0.01


@pytest.mark.seconds
@pytest.mark.parametrize("make", [count_statistic, mean_statistic])
def test_two_samples_of_one_law_raise_no_more_false_alarms_than_the_rate(make: Make) -> None:
    draw, num_alarms = random.Random(7), 0
    for seed in range(NUM_TESTS):
        groups = [group(draw, 15, law, law) for law in ([0.4, 0.3, 0.2, 0.1], [0.9, 0.05, 0.05])]
        num_alarms += p_value(make(groups, swaps(groups, num_swaps=49, seed=seed))) <= RATE
    assert num_alarms <= MOST_ALARMS


@pytest.mark.parametrize(
    ("make", "laws", "shift"),
    [(count_statistic, ([0.5, 0.3, 0.2], [0.3, 0.3, 0.4]), 0.0), (mean_statistic, ([0.5, 0.5], [0.5, 0.5]), 0.4)],
)
def test_a_difference_of_laws_is_found(make: Make, laws: tuple[list[float], list[float]], shift: float) -> None:
    """250 pairs: the noncentral laws of both statistics miss these faults at 5e-4 less than once in 1000 times."""
    pairs = group(random.Random(8), 250, *laws, shift=shift)
    assert p_value(make([pairs], swaps([pairs], num_swaps=9999, seed=0))) <= 5e-4


@pytest.mark.seconds
def test_the_interval_of_the_total_variation_holds_it_and_the_noise_is_what_chance_gives() -> None:
    """The interval covers at least 95 %; of 200 that may miss 10, more than 22 are missed with probability 1e-4."""
    draw, laws = random.Random(9), ([0.5, 0.3, 0.2], [0.4, 0.2, 0.4])
    num_covered, values, noises = 0, [], []
    for seed in range(200):
        groups = [group(draw, 100, *laws) for _ in range(2)]
        measured = total_variation(groups, num_swaps=20, seed=seed)
        num_covered += measured.interval.low <= 0.2 <= measured.interval.high
        same = total_variation([group(draw, 100, laws[0], laws[0])], num_swaps=20, seed=seed)
        values.append(same.value)
        noises.append(same.noise)
    assert num_covered >= 178
    assert sum(values) == pytest.approx(sum(noises), rel=0.1)


def test_rare_symbols_are_merged_by_both_samples_together() -> None:
    """So no swap changes which ones are: two of three pairs of rare symbols are swapped."""
    column = [*product([0], [0] * 10), (1, 2), (3, 4), (5, 0)]
    pairs = PairedGroup(columns=[column], differences=[0.0] * 13)
    swapped = PairedGroup(columns=[[*column[:10], (2, 1), (3, 4), (0, 5)]], differences=[0.0] * 13)
    none, some = np.ones((1, 13)), np.array([[1.0] * 10 + [-1, 1, -1]])
    assert count_statistic([pairs], [some]) == count_statistic([swapped], [none])
    assert count_statistic([pairs], [none]) == pytest.approx(1 / 21 + 1 / 5), "the rare ones count as one symbol"
