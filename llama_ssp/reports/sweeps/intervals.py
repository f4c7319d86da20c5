"""95 % intervals by the bootstrap: what would have been measured with other prompts of the same kind.

A prompt is the unit that is drawn, since completions of one prompt are alike. The seed is fixed, so that the same
records give the same report.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
LEAST_PROMPTS = 6
"""Fewer prompts have no 95 % interval of a median: all lie on one side of it in 1 of 16 samples of five."""
NUM_RESAMPLES = 2000
SEED = 20230202
_MOST_NUMBERS = 1 << 22
"""Numbers that are drawn at once."""
Array: TypeAlias = NDArray[np.float64]
Statistic: TypeAlias = Callable[[Array], Array]
"""Computes a figure of each sample from numbers (samples, prompts, columns)."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure of a run over its prompts; without an interval if they are too few."""

    value: float
    low: float | None = None
    high: float | None = None


def estimate(prompts: Sequence[Sequence[float]], statistic: Statistic) -> Estimate:
    """Compute a figure and its interval from a row of numbers for each prompt, of which there is at least one.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; the widening of `_tail` for small samples:
    Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3.
    """
    numbers = np.asarray(prompts, dtype=np.float64)
    value = float(statistic(numbers[None])[0])
    if len(numbers) < LEAST_PROMPTS:
        return Estimate(value=value)
    draw = np.random.default_rng(SEED)
    at_once = max(_MOST_NUMBERS // numbers.size, 1)
    samples = []
    for first in range(0, NUM_RESAMPLES, at_once):
        num = min(at_once, NUM_RESAMPLES - first)
        samples.append(statistic(numbers[draw.integers(len(numbers), size=(num, len(numbers)))]))
    low, high = _middle_quantiles(np.concatenate(samples), _tail(len(numbers)))
    return Estimate(value=value, low=low, high=high)


def median(samples: Array) -> Array:
    """The median over prompts of the first column."""
    return np.asarray(np.median(samples[..., 0], axis=1))


def ratio(samples: Array) -> Array:
    """The sum of the first column over that of the second."""
    sums = samples.sum(axis=1)
    return np.asarray(sums[:, 0] / sums[:, 1])


def _tail(num: int) -> float:
    """Share of samples below the interval: as if the bootstrap's spread had the quantiles of Student's t."""
    z, freedom = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), num - 1
    # The first terms of the expansion of Student's quantile in 1 / freedom (Abramowitz and Stegun 26.7.5).
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-math.sqrt(num / freedom) * t)


def _middle_quantiles(samples: Array, tail: float) -> tuple[float, float]:
    """The two quantiles of a distribution that may have few values, interpolated between the middles of its steps."""
    values, counts = np.unique(samples, return_counts=True)
    middles = (np.cumsum(counts) - counts / 2) / len(samples)
    low, high = np.interp([tail, 1 - tail], middles, values)
    return float(low), float(high)
