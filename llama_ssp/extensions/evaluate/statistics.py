"""Intervals and tests; pure functions of counts and numbers, without torch and without a statistics package.

The two-sample test swaps the members of pairs. A pair holds one draw of each of two samplers. If both samplers have one
distribution, a pair is as probable as the swapped one, whatever that distribution is, and so is every statistic: the
p-value is exact for any sample size.

Shapes: S swaps, of which the first swaps nothing; N pairs of a group; C symbols.
"""

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

CONFIDENCE = 0.95
_LEAST_EXPECTED = 5
"""Symbols with fewer draws than this in both samples together are counted as one."""


class Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


def wilson(num_right: int, num_tried: int, *, confidence: float = CONFIDENCE) -> Interval:
    """The score interval of a rate.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = _two_sided(confidence)
    rate, scale = num_right / num_tried, 1 + z * z / num_tried
    centre = (rate + z * z / (2 * num_tried)) / scale
    half = z * math.sqrt(rate * (1 - rate) / num_tried + (z / (2 * num_tried)) ** 2) / scale
    return Interval(max(centre - half, 0.0), min(centre + half, 1.0))


def rate_difference(
    num_first_alone: int, num_second_alone: int, num_pairs: int, *, confidence: float = CONFIDENCE
) -> Interval:
    """An interval of the second rate minus the first, where both are rates over the same pairs.

    Half a success is added to each of the four kinds of pairs, so that equal outcomes also leave an interval.

    Source: Agresti and Min 2005, "Simple improved confidence intervals for comparing matched proportions".
    """
    first, second, total = num_first_alone + 0.5, num_second_alone + 0.5, num_pairs + 2
    difference = (second - first) / total
    half = _two_sided(confidence) * math.sqrt((first + second) / total - difference**2) / math.sqrt(total)
    return Interval(difference - half, difference + half)


def mean_interval(groups: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE) -> Interval:
    """The normal interval of a mean over groups of numbers, each with its own mean; groups have at least two."""
    num, variance = sum(map(len, groups)), 0.0
    for group in groups:
        mean = fmean(group)
        variance += len(group) * sum((value - mean) ** 2 for value in group) / (len(group) - 1)
    mean, half = sum(map(sum, groups)) / num, _two_sided(confidence) * math.sqrt(variance) / num
    return Interval(mean - half, mean + half)


def _two_sided(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


class PairedGroup(NamedTuple):
    """Pairs with something in common, such as a prompt.

    Attributes:
        columns: symbols of the first and of the second member of each pair; one list of pairs for each position.
        differences: for each pair, a number of the second member minus that of the first.
    """

    columns: Sequence[Sequence[tuple[Hashable, Hashable]]]
    differences: Sequence[float]


def swaps(groups: Sequence[PairedGroup], *, num_swaps: int, seed: int) -> "list[Array]":
    """Draw random swaps of the pairs of each group: (S, N) with -1 for a swapped pair, else 1."""
    import numpy as np

    draw, sizes = random.Random(seed), [len(group.differences) for group in groups]
    bits = [[draw.getrandbits(size) for size in sizes] for _ in range(num_swaps)]
    signs = []
    for size, of_group in zip(sizes, zip([0] * len(sizes), *bits, strict=True), strict=True):
        packed = b"".join(bits.to_bytes(-(-size // 8), "little") for bits in of_group)
        swapped = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").reshape(num_swaps + 1, -1)
        signs.append(1.0 - 2.0 * swapped[:, :size])
    return signs


def p_value(statistic_S: "Array") -> float:
    """The p-value of the observed statistic, the first, among random swaps; large values are evidence against one law.

    With one distribution, the probability that this number is at most x is at most x; it is never below 1 / S.

    Source: Phipson and Smyth 2010, "Permutation p-values should never be zero".
    """
    observed = statistic_S[0]
    threshold = observed - 1e-9 * abs(observed)  # sums of the same numbers in another order
    return float((statistic_S >= threshold).mean())


def count_statistic(groups: Sequence[PairedGroup], signs: "Sequence[Array]") -> "Array":
    """The chi-square statistic of equal counts, summed over the columns of all groups, after each swap."""
    total_S = 0.0 * signs[0][:, 0]
    for group, signs_SN in zip(groups, signs, strict=True):
        for column in group.columns:
            surplus_NC, draws_C = _symbols(column, least=_LEAST_EXPECTED)
            total_S += ((signs_SN @ surplus_NC) ** 2 / draws_C).sum(axis=1)
    return total_S


def mean_statistic(groups: Sequence[PairedGroup], signs: "Sequence[Array]") -> "Array":
    """The absolute sum of all differences, after each swap."""
    sums = [signs_SN @ group.differences for group, signs_SN in zip(groups, signs, strict=True)]
    return abs(sum(sums[1:], sums[0]))


def _symbols(column: Sequence[tuple[Hashable, Hashable]], *, least: int = 1) -> "tuple[Array, Array]":
    """Return, for each pair and symbol, how many more draws of it the first sample has; and all draws of each symbol.

    Rare symbols are merged into the last one. Which symbols are rare depends on both samples together, so not on swaps.
    """
    import numpy as np

    counts = Counter(chain.from_iterable(column))
    kept = [symbol for symbol, num in counts.items() if num >= least]
    place = {symbol: number for number, symbol in enumerate(kept)}
    surplus_NC = np.zeros((len(column), len(kept) + 1))
    for of_pair, (first, second) in zip(surplus_NC, column, strict=True):
        of_pair[place.get(first, -1)] += 1
        of_pair[place.get(second, -1)] -= 1
    num_kept = [counts[symbol] for symbol in kept]
    return surplus_NC, np.array([*num_kept, max(2 * len(column) - sum(num_kept), 1)])


class TotalVariation(NamedTuple):
    """The measured total variation between two samples, mean over columns, and an interval of the true one.

    `noise` is what two samples of one distribution would show on average.
    """

    value: float
    interval: Interval
    noise: float


def total_variation(groups: Sequence[PairedGroup], *, num_swaps: int = 200, seed: int = 0) -> TotalVariation:
    """Measure how far two samples are apart.

    The measured value is above the true one by at most the noise on average, and one draw moves it by at most one over
    the number of pairs, which bounds how far it is from its own mean.

    Source: McDiarmid 1989, "On the method of bounded differences".
    """
    by_column = [
        abs(signs_SN @ _symbols(column)[0]).sum(axis=1) / (2 * len(column))
        for group, signs_SN in zip(groups, swaps(groups, num_swaps=num_swaps, seed=seed), strict=True)
        for column in group.columns
    ]
    measured, *by_chance = (float(value) for value in sum(by_column) / len(by_column))
    noise, sizes = fmean(by_chance), [len(group.differences) for group in groups]
    reach = math.sqrt(math.log(2 / (1 - CONFIDENCE)) / (len(groups) * min(sizes)))
    return TotalVariation(measured, Interval(max(measured - noise - reach, 0.0), min(measured + reach, 1.0)), noise)
