"""Comparison on a noisy machine: all candidates run in every repetition, in turns.

On a shared machine a single time means little. Report a median over repetitions, or the median of ratios within them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence


def interleave(
    candidates: Mapping[str, Callable[[int], float]], *, num_repetitions: int, num_warmup: int = 1
) -> dict[str, list[float]]:
    """Run all candidates in every repetition; returns the measurements of each candidate, in order.

    Every second repetition runs backwards, so that none always follows the one that empties the processor's caches. A
    candidate takes the number of the repetition, which is negative in the `num_warmup` ones that are discarded.
    """
    measured: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-num_warmup, num_repetitions):
        for name in [*candidates][:: -1 if repetition % 2 else 1]:
            value = candidates[name](repetition)
            if repetition >= 0:
                measured[name].append(value)
    return measured


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: others only ever add time, and the quartile excludes most of it."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of measurements taken in the same repetition."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
