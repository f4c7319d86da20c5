"""Intervals and tests; pure functions of counts and numbers, without torch and without a statistics package.

The two-sample test swaps the members of pairs. A pair holds one draw of each of two samplers. If both samplers have one
distribution, a pair is as probable as the swapped one, whatever that distribution is, and so is every statistic: the
p-value is exact for any sample size. Sets of pairs are bits of integers, so that a swap of all pairs costs one `&` per
symbol.
"""

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import getitem
from statistics import NormalDist, fmean
from typing import NamedTuple

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


@dataclass(frozen=True, kw_only=True)
class PairedGroup:
    """Pairs with something in common, such as a prompt.

    Attributes:
        columns: symbols of the first and of the second member of each pair; one list of pairs for each position.
        differences: a number of the second member minus that of the first.
    """

    columns: Sequence[Sequence[tuple[Hashable, Hashable]]]
    differences: Sequence[float]


class _Cell(NamedTuple):
    """One symbol of a column: bits of the pairs where only the first, or only the second, has it; and all its draws."""

    first: int
    second: int
    num_draws: int

    def surplus(self, swapped: int) -> int:
        """How many more draws the first sample has after the given pairs are swapped."""
        first, second = self.first, self.second
        kept = first.bit_count() - second.bit_count()
        return kept - 2 * ((first & swapped).bit_count() - (second & swapped).bit_count())


def _cells(column: Sequence[tuple[Hashable, Hashable]], *, least: int = 1) -> list[_Cell]:
    """The symbols of a column; rare ones are merged, which depends on both samples together and so on no swap."""
    counts: dict[Hashable, int] = {}
    for pair in column:
        for symbol in pair:
            counts[symbol] = counts.get(symbol, 0) + 1
    merged = {symbol: symbol if num >= least else None for symbol, num in counts.items()}
    bits: dict[Hashable, list[int]] = {}
    for place, pair in enumerate(column):
        for member, symbol in enumerate(pair):
            bits.setdefault((merged[symbol],), [0, 0])[member] |= 1 << place
    return [_Cell(a & ~b, b & ~a, a.bit_count() + b.bit_count()) for a, b in bits.values()]


def swap_test(
    statistic: Callable[[Sequence[int]], float], group_sizes: Sequence[int], *, num_swaps: int, seed: int
) -> float:
    """The p-value of the observed statistic among random swaps.

    Args:
        statistic: of the pairs after those in the given bits, an integer per group, have been swapped; large values are
            evidence of two distributions.
        group_sizes: pairs of each group.
        num_swaps: random swaps of all pairs; no p-value is below 1 / (num_swaps + 1).
        seed: of the swaps.

    Returns:
        With one distribution, the probability that this number is at most x is at most x.

    Source: Phipson and Smyth 2010, "Permutation p-values should never be zero".
    """
    observed = statistic([0] * len(group_sizes))
    threshold = observed - 1e-9 * abs(observed)  # sums of the same numbers in another order
    swaps = _swaps(group_sizes, num_swaps=num_swaps, seed=seed)
    return (1 + sum(statistic(swapped) >= threshold for swapped in swaps)) / (num_swaps + 1)


def _swaps(group_sizes: Sequence[int], *, num_swaps: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.getrandbits(size) for size in group_sizes] for _ in range(num_swaps)]


def count_statistic(groups: Sequence[PairedGroup]) -> Callable[[Sequence[int]], float]:
    """The chi-square statistic of equal counts, summed over the columns of all groups; for `swap_test`."""
    cells = [[cell for column in group.columns for cell in _cells(column, least=_LEAST_EXPECTED)] for group in groups]

    def statistic(swapped: Sequence[int]) -> float:
        return sum(
            cell.surplus(bits) ** 2 / cell.num_draws
            for of_group, bits in zip(cells, swapped, strict=True)
            for cell in of_group
        )

    return statistic


def mean_statistic(groups: Sequence[PairedGroup]) -> Callable[[Sequence[int]], float]:
    """The absolute sum of all differences; for `swap_test`."""
    tables = [
        [_signed_sums(group.differences[at : at + 8]) for at in range(0, len(group.differences), 8)] for group in groups
    ]

    def statistic(swapped: Sequence[int]) -> float:
        total = 0.0
        for sums, bits in zip(tables, swapped, strict=True):
            total += sum(map(getitem, sums, bits.to_bytes(len(sums), "little")))
        return abs(total)

    return statistic


def _signed_sums(values: Sequence[float]) -> list[float]:
    """The sum of up to eight values for each byte, whose bits say which of them are negated."""
    sums = [0.0]
    for value in values:
        sums = [total + value for total in sums] + [total - value for total in sums]
    return sums


class TotalVariation(NamedTuple):
    """The measured total variation between two samples, mean over columns, and an interval of the true one.

    `noise` is what two samples of one distribution would show on average.
    """

    value: float
    interval: Interval
    noise: float


def total_variation(
    groups: Sequence[PairedGroup], *, confidence: float = CONFIDENCE, num_swaps: int = 200, seed: int = 0
) -> TotalVariation:
    """Measure how far two samples are apart.

    The measured value is above the true one by at most the noise on average, and one draw moves it by at most one over
    the number of pairs, which bounds how far it is from its own mean.

    Source: McDiarmid 1989, "On the method of bounded differences".
    """
    cells = [[_cells(column) for column in group.columns] for group in groups]
    sizes = [len(group.differences) for group in groups]

    def value(swapped: Sequence[int]) -> float:
        return fmean(
            sum(abs(cell.surplus(bits)) for cell in column) / (2 * size)
            for columns, size, bits in zip(cells, sizes, swapped, strict=True)
            for column in columns
        )

    measured = value([0] * len(groups))
    noise = fmean(map(value, _swaps(sizes, num_swaps=num_swaps, seed=seed)))
    reach = math.sqrt(math.log(2 / (1 - confidence)) / (len(groups) * min(sizes)))
    interval = Interval(max(measured - noise - reach, 0.0), min(measured + reach, 1.0))
    return TotalVariation(measured, interval, noise)
