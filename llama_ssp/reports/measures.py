"""Measurements of one run with 95 % intervals by the bootstrap: the range that other prompts of the kind would give.

A prompt is the unit that is drawn, since completions of one prompt are alike. The seed is fixed, so that the same
records give the same report.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from llama_ssp.reports.records import PLAIN, SPECULATIVE, CompletionLine
from llama_ssp.reports.summary import counted_rounds, ms_per_token, pairs_of

CONFIDENCE = 0.95
LEAST_PROMPTS = 6
"""Fewer prompts have no 95 % interval of a median: all lie on one side of it in 1 of 16 samples of five."""
NUM_RESAMPLES = 2000
SEED = 20230202
PERCENTILES = (50, 90, 99)


class Estimate(NamedTuple):
    """A figure of a run over its prompts; without an interval if they are too few."""

    value: float
    low: float | None = None
    high: float | None = None


class ModeMeasures(NamedTuple):
    """One mode of a run.

    Attributes:
        ms_per_token: median over prompts.
        ms_percentiles, first_token_percentiles: p50, p90 and p99 over completions, in ms; the second ones are None for
            lines of earlier versions.
    """

    num_completions: int
    ms_per_token: Estimate
    ms_percentiles: tuple[float | None, ...]
    first_token_percentiles: tuple[float | None, ...]


class RunMeasures(NamedTuple):
    """The measures of a run. A figure that the run did not measure is None, or has no entry in `modes`.

    Attributes:
        pairs: plain and speculative ms/token of each prompt that has both.
        speedup: median over these prompts of plain over speculative ms/token.
        acceptance: accepted over examined drafted tokens.
    """

    modes: dict[str, ModeMeasures]
    pairs: list[tuple[float, float]]
    speedup: Estimate | None
    acceptance: Estimate | None

    def ms_per_token(self, mode: str) -> Estimate | None:
        """Median over prompts of one mode."""
        return self.modes[mode].ms_per_token if mode in self.modes else None

    @property
    def num_faster(self) -> int:
        """Prompts whose speculative completions took less time per token."""
        return sum(fast < plain for plain, fast in self.pairs)


def measure(lines: Sequence[CompletionLine]) -> RunMeasures:
    """Compute the measures of a run from its completions."""
    by_mode = {mode: [line for line in lines if line.mode == mode] for mode in (PLAIN, SPECULATIVE)}
    both = pairs_of(lines)
    plain, fast = (dict(_times([pair[side] for pair in both])) for side in (0, 1))
    pairs = [(ms, fast[prompt]) for prompt, ms in plain.items() if fast.get(prompt)]
    rounds = [counted_rounds(of_prompt) for _, of_prompt in _by_prompt(by_mode[SPECULATIVE])]
    counts = [
        (float(sum(kept for kept, _ in counted)), float(sum(seen for _, seen in counted)))
        for counted in rounds
        if counted
    ]
    return RunMeasures(
        modes={mode: found for mode, lines in by_mode.items() if (found := _of_mode(lines))},
        pairs=pairs,
        speedup=median([plain_ms / fast_ms for plain_ms, fast_ms in pairs]) if pairs else None,
        acceptance=ratio(counts) if counts else None,
    )


def median(prompts: Sequence[float]) -> Estimate:
    """The median of one number per prompt, and its interval by the smoothed bootstrap.

    The smoothed distribution is interpolated linearly between the numbers, so that a draw from it has a uniform rank.
    The median of `n` such ranks follows the beta distribution below, whatever the numbers are. Without interpolation,
    the median of a small sample could take few values only, and the interval would be too narrow or too wide.

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
    """The sum of the first numbers over the sum of the second, and its interval by the bootstrap.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; for the widening of `_tail` Hesterberg 2015,
    "What teachers should know about the bootstrap", section 5.3.
    """
    numbers, num = np.asarray(prompts, dtype=np.float64), len(prompts)
    value = float(numbers[:, 0].sum() / numbers[:, 1].sum())
    if num < LEAST_PROMPTS:
        return Estimate(value=value)
    draw = np.random.default_rng(SEED)
    parts = (draw.integers(num, size=(NUM_RESAMPLES // 20, num)) for _ in range(20))  # all at once take much memory
    sums = np.concatenate([numbers[drawn].sum(axis=1) for drawn in parts])
    tail = _tail(num)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [tail, 1 - tail])
    return Estimate(value=value, low=float(low), high=float(high))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's quantile of a two-sided 95 % interval, for 1 to 10 degrees of freedom; more take the last one."""


def over_runs(found: Sequence[Estimate | None]) -> Estimate | None:
    """Return a figure over runs that differ only in their seed: the mean, with Student's confidence interval.

    A single run's figure is returned as it is. None if a run has no figure.

    Source: Student 1908, "The probable error of a mean".
    """
    if len(found) == 1:
        return found[0]
    values = np.array([one.value for one in found if one is not None])
    if len(values) < len(found):
        return None
    half = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1] * float(values.std(ddof=1)) / math.sqrt(len(values))
    mean = float(values.mean())
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)


def _tail(num: int) -> float:
    """Share of resamples below the interval, widened so that it matches the quantiles of Student's t."""
    z, freedom = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), num - 1
    # The first terms of the expansion of Student's quantile in 1 / freedom (Abramowitz and Stegun 26.7.5).
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-math.sqrt(num / freedom) * t)


def _of_mode(lines: Sequence[CompletionLine]) -> ModeMeasures | None:
    lines = [line for line in lines if line.num_new_tokens]
    if not lines:
        return None
    first = [line.first_token_ms for line in lines if line.first_token_ms is not None]
    return ModeMeasures(
        num_completions=len(lines),
        ms_per_token=median([ms for _, ms in _times(lines)]),
        ms_percentiles=_percentiles([line.ms / line.num_new_tokens for line in lines]),
        first_token_percentiles=_percentiles(first if len(first) == len(lines) else []),
    )


def _times(lines: Sequence[CompletionLine]) -> Iterator[tuple[int, float]]:
    """Yield each prompt and its ms/token over all its samples."""
    for prompt, of_prompt in _by_prompt(lines):
        if ms := ms_per_token(of_prompt):
            yield prompt, ms


def _by_prompt(lines: Sequence[CompletionLine]) -> list[tuple[int, list[CompletionLine]]]:
    """The completions of each prompt, in order; all turns of a conversation count as one prompt."""
    prompts: dict[int, list[CompletionLine]] = {}
    for line in lines:
        prompts.setdefault(line.index - line.turn, []).append(line)
    return sorted(prompts.items())


def _percentiles(values: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(float(value) for value in np.percentile(values, PERCENTILES)) if values else (None,) * len(PERCENTILES)
