"""Fits the acceptance of pairs, and the error of times by data sheets; `benchmarks.ranges` writes both."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from benchmarks.points import Point
from llama_ssp.planning.acceptance.fitted import (
    FEATURES,
    AcceptanceFit,
    FittedPair,
    features,
    probability_of,
)
from llama_ssp.planning.acceptance.pair import CONFIDENCE
from llama_ssp.planning.time_error import TimeError

PRIOR_SPREAD = {
    "level": 2.0, "size": 0.5, "temperature": 1.0, "code": 1.0, "block": 0.5, "coupled": 0.5, "own_tokenizer": 1.0,
    "trained_together": 1.0,
}  # fmt: skip
"""Standard deviations of the coefficients, around 0, before any point is seen: in logarithms of odds."""
SPREADS = tuple(0.02 * 1.3**step for step in range(16))
PRIOR_OF_SPREADS = 0.5
"""Spreads between pairs and within a pair that are averaged over, 0.02 to 1.02, and their half-normal prior.

With so few pairs the likeliest spread between them is next to none, and ranges made of it would be too narrow.
"""
MOST_POINTS = 3
"""A pair with more points counts as if it had as many, so that no pair decides for all others."""

Numbers = NDArray[np.float64]


def fit_acceptance(chosen: Sequence[Point]) -> AcceptanceFit:
    """Fit a linear model with an effect of each pair, and spreads by their mean variances over SPREADS."""
    design = np.array([features(point.pair) for point in chosen])
    odds = np.array([point.odds for point in chosen])
    counts = Counter(point.names for point in chosen)
    crowding = np.diag([max(counts[point.names] / MOST_POINTS, 1.0) for point in chosen])
    same_pair = np.array([[float(one.names == other.names) for other in chosen] for one in chosen])
    prior = np.diag([PRIOR_SPREAD[name] ** 2 for name in FEATURES])
    between, within = _spreads(odds, same_pair, design @ prior @ design.T)
    weighted = np.linalg.solve(between**2 * same_pair + within**2 * crowding, design)
    covariance = np.linalg.inv(design.T @ weighted + np.linalg.inv(prior))
    return AcceptanceFit(
        coefficients=tuple(map(float, covariance @ weighted.T @ odds)),
        covariance=tuple(tuple(map(float, row)) for row in covariance),
        between_pairs=between,
        within_pair=within,
        quantile=student_quantile(len(counts) - 2),
        num_points=len(chosen),
        pairs=tuple(_fitted_pair([point for point in chosen if point.names == names]) for names in counts),
    )


def _spreads(odds: Numbers, same_pair: Numbers, of_coefficients: Numbers) -> tuple[float, float]:
    """The roots of the mean variances between pairs and within a pair, weighted by evidence and prior."""
    grid = list(product(SPREADS, repeat=2))
    logs = []
    for between, within in grid:
        covariance = between**2 * same_pair + within**2 * np.eye(len(odds)) + of_coefficients
        _, log_determinant = np.linalg.slogdet(covariance)
        evidence = -(log_determinant + odds @ np.linalg.solve(covariance, odds)) / 2
        # Steps of the grid are proportional to the spreads.
        logs.append(evidence + math.log(between * within) - (between**2 + within**2) / (2 * PRIOR_OF_SPREADS**2))
    weights = np.exp(np.array(logs) - max(logs))
    variances = weights @ np.square(grid) / weights.sum()
    return math.sqrt(variances[0]), math.sqrt(variances[1])


def _fitted_pair(of_pair: Sequence[Point]) -> FittedPair:
    pair, ratio = of_pair[0].pair, of_pair[0].pair.size_ratio
    assert ratio, "every pair of the points has its sizes"
    mean = probability_of(fmean(point.odds for point in of_pair))
    return FittedPair(
        target=pair.target, draft=pair.draft, family=str(pair.family), size_ratio=ratio, acceptance=mean,
        trained_together=pair.trained_together,
    )  # fmt: skip


def student_quantile(freedom: int) -> float:
    """The quantile of Student's t at the ends of a range, by its expansion in 1 / freedom.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def fit_times(errors: Sequence[float]) -> TimeError:
    """Fit the logarithms of published over forecast times by their mean and spread, for the range of one more."""
    num = len(errors)
    spread = stdev(errors) * math.sqrt(1 + 1 / num)
    return TimeError(mean=fmean(errors), spread=spread, quantile=student_quantile(num - 1))
