"""95 % intervals by the bootstrap: what would have been measured with other prompts of the same kind.

A prompt is the unit that is drawn, since completions of one prompt are alike. The seed is fixed, so that the same
records give the same report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
LEAST_PROMPTS = 6
"""Fewer prompts have no 95 % interval of a median: all lie on one side of it in 1 of 16 samples of five."""
NUM_RESAMPLES = 2000
SEED = 20230202
_MOST_DRAWN = 1 << 22
"""Numbers that are drawn at once."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure of a run over its prompts; without an interval if they are too few."""

    value: float
    low: float | None = None
    high: float | None = None


def median(prompts: Sequence[float]) -> Estimate:
    """The median of one number per prompt, and its interval by the smoothed bootstrap.

    A draw from the prompts' distribution, interpolated between them, has a uniform place among them. The median of `n`
    such places follows the beta distribution below, whatever the numbers are. Without interpolation, the few values
    that the median of a small sample can take would make the interval too narrow or too wide.

    Source: Efron and Tibshirani 1993, "An introduction to the bootstrap", section 16.4.
    """
    values, num = np.sort(np.asarray(prompts, dtype=np.float64)), len(prompts)
    value = float(np.median(values))
    if num < LEAST_PROMPTS:
        return Estimate(value=value)
    places = np.random.default_rng(SEED).beta((num + 1) / 2, (num + 1) / 2, size=NUM_RESAMPLES)
    tail = (1 - CONFIDENCE) / 2
    ends = np.quantile(places, [tail, 1 - tail]) * (num + 1)
    low, high = np.interp(ends, np.arange(1, num + 1), values)
    return Estimate(value=value, low=float(low), high=float(high))


def ratio(prompts: Sequence[tuple[float, float]]) -> Estimate:
    """The sum of the first numbers over that of the second, and its interval by the bootstrap.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; for the widening of `_tail` Hesterberg 2015,
    "What teachers should know about the bootstrap", section 5.3.
    """
    numbers, num = np.asarray(prompts, dtype=np.float64), len(prompts)
    value = float(numbers[:, 0].sum() / numbers[:, 1].sum())
    if num < LEAST_PROMPTS:
        return Estimate(value=value)
    draw, ratios = np.random.default_rng(SEED), []
    at_once = max(_MOST_DRAWN // num, 1)
    for first in range(0, NUM_RESAMPLES, at_once):
        drawn = draw.integers(num, size=(min(at_once, NUM_RESAMPLES - first), num))
        sums = numbers[drawn].sum(axis=1)
        ratios.append(sums[:, 0] / sums[:, 1])
    tail = _tail(num)
    low, high = np.quantile(np.concatenate(ratios), [tail, 1 - tail])
    return Estimate(value=value, low=float(low), high=float(high))


def _tail(num: int) -> float:
    """Share of samples below the interval: as if the bootstrap's spread had the quantiles of Student's t."""
    z, freedom = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), num - 1
    # The first terms of the expansion of Student's quantile in 1 / freedom (Abramowitz and Stegun 26.7.5).
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-math.sqrt(num / freedom) * t)
