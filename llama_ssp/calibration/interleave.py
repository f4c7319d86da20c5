"""How things are compared on a machine that is not quiet: taken in turns, within one run.

On a shared machine a single time says little. All candidates run in every repetition, one after the other, and what is
reported is a median over repetitions, or the median of the ratios within one.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence


def interleave(
    candidates: Mapping[str, Callable[[int], float]], *, num_repetitions: int, num_warmup: int = 1
) -> dict[str, list[float]]:
    """Run all candidates in every repetition.

    Args:
        candidates: each is called with the number of the repetition, and returns what it measured.
        num_repetitions: counted repetitions.
        num_warmup: repetitions before them that are not counted; their numbers are negative.

    Returns:
        The measurements of each candidate, in order of the repetitions.
    """
    measured: dict[str, list[float]] = {name: [] for name in candidates}
    for repetition in range(-num_warmup, num_repetitions):
        for name, measure in candidates.items():
            value = measure(repetition)
            if repetition >= 0:
                measured[name].append(value)
    return measured


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
