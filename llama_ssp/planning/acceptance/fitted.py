"""Forecasts the acceptance of a pair that nobody has measured, with a range, from those that somebody has.

    logit(acceptance) = level + coefficients x features + what is special to the pair + what is special to a measurement

`python -m benchmarks.ranges` fits the coefficients to the points of conf/acceptance.yaml and writes conf/ranges.yaml.
Unknown features are taken in their middle, and widen the range. Nothing here needs numpy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from llama_ssp.config import folders
from llama_ssp.config.schema import TextKind
from llama_ssp.planning.acceptance.pair import Acceptance, DraftedPair

FEATURES = ("level", "size", "temperature", "code", "block", "coupled", "own_tokenizer", "trained_together")
MIDDLE_RATIO, MIDDLE_TEMPERATURE = 8.0, 0.5
"""Parameters of target over draft, and temperature, where their features are 0."""
SPREAD_OF_UNKNOWN = {"size": 1.0, "temperature": 0.3, "code": 0.5}
"""Standard deviation of a feature that is not known: a factor of e in size, all temperatures to 1, either text."""
_CODE = {TextKind.code: 0.5, TextKind.prose: -0.5, TextKind.any: 0.0}
_OTHER_FAMILY = 1.0
"""How far another family counts among the nearest pairs, in logarithms of the size ratio."""


@dataclass(frozen=True, kw_only=True)
class FittedPair:
    """A pair that the fit stands on; `acceptance` is the mean of its points."""

    target: str
    draft: str
    family: str
    size_ratio: float
    acceptance: float
    trained_together: bool = False


@dataclass(frozen=True, kw_only=True)
class AcceptanceFit:
    """What `benchmarks.ranges` fitted.

    Attributes:
        coefficients: of FEATURES.
        covariance: of the coefficients, in the same order.
        between_pairs, within_pair: standard deviations of what is special to a pair, and to a measurement of it.
        quantile: standard deviations from the median to either end of a range.
        num_points: measurements, of all `pairs`.
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    between_pairs: float
    within_pair: float
    quantile: float
    num_points: int
    pairs: tuple[FittedPair, ...]

    @property
    def size_ratios(self) -> tuple[float, float]:
        """The smallest and the largest ratio of sizes among the pairs."""
        ratios = [pair.size_ratio for pair in self.pairs]
        return min(ratios), max(ratios)


def features(pair: DraftedPair) -> tuple[float, ...]:
    """The values of FEATURES; 0 for one that is not known."""
    samples = pair.temperature != 0  # all rules coincide at temperature 0
    return (
        1.0,
        math.log(pair.size_ratio / MIDDLE_RATIO) if pair.size_ratio else 0.0,
        0.0 if pair.temperature is None else pair.temperature - MIDDLE_TEMPERATURE,
        _CODE[pair.text],
        float(samples and pair.rule == "block"),
        float(samples and pair.rule == "coupled"),
        float(pair.own_tokenizer),
        float(pair.trained_together),
    )


def predicted(pair: DraftedPair, fit: AcceptanceFit) -> tuple[float, float, float]:
    """The low end, the median and the high end of a pair's acceptance."""
    values = features(pair)
    middle = _dot(values, fit.coefficients)
    of_fit = _dot(values, [_dot(values, row) for row in fit.covariance])
    of_pair = fit.between_pairs**2 + fit.within_pair**2
    half = fit.quantile * math.sqrt(of_fit + of_pair + _variance_of_unknown(pair, fit))
    return probability_of(middle - half), probability_of(middle), probability_of(middle + half)


def around(probability: float) -> tuple[float, float]:
    """The range of a pair's own figure: other prompts and other machines give others."""
    fit = shipped_fit()
    half, middle = fit.quantile * fit.within_pair, logit(probability)
    return probability_of(middle - half), probability_of(middle + half)


def logit(probability: float) -> float:
    """The logarithm of the odds; of 0 and 1 those of a probability next to them."""
    inside = min(max(probability, 1e-3), 1 - 1e-3)
    return math.log(inside / (1 - inside))


def probability_of(odds: float) -> float:
    """The inverse of `logit`."""
    return 1 / (1 + math.exp(-odds))


@lru_cache(maxsize=1024)  # a search asks for the same few pairs
def forecast(pair: DraftedPair) -> Acceptance:
    """The forecast of a pair with a draft model; its source says what the range rests on."""
    fit = shipped_fit()
    low, middle, high = predicted(pair, fit)
    named = " and ".join(f"{each.target} with {each.draft} ({each.acceptance:.2f})" for each in _nearest(pair, fit))
    basis = f"fitted to {fit.num_points} points of {len(fit.pairs)} pairs, nearest {named}"
    smallest, largest = fit.size_ratios
    if pair.size_ratio is None:
        basis += "; the sizes are not known"
    elif not smallest <= pair.size_ratio <= largest:
        basis += f"; the target is {pair.size_ratio:.3g} times as large as the draft, "
        basis += f"in those pairs {smallest:.2g} to {largest:.2g} times"
    source = f"no figure of this pair: {basis}"
    return Acceptance(probability=middle, low=low, high=high, source=source, is_forecast=True)


@cache
def shipped_fit() -> AcceptanceFit:
    """The fit of the package."""
    return read_fit(folders.read(folders.conf_dir() / "ranges.yaml")["acceptance"])


def read_fit(content: Mapping[str, Any]) -> AcceptanceFit:
    """Build a fit from its section of conf/ranges.yaml."""
    read = {
        "coefficients": tuple(content["coefficients"][name] for name in FEATURES),
        "covariance": tuple(map(tuple, content["covariance"])),
        "pairs": tuple(FittedPair(**pair) for pair in content["pairs"]),
    }
    return AcceptanceFit(**{**content, **read})


def _nearest(pair: DraftedPair, fit: AcceptanceFit) -> Sequence[FittedPair]:
    """The two pairs that are most alike, of those that were trained apart as any pair is."""

    def distance(other: FittedPair) -> float:
        ratio = pair.size_ratio or MIDDLE_RATIO
        return abs(math.log(ratio / other.size_ratio)) + _OTHER_FAMILY * (other.family != pair.family)

    return sorted((each for each in fit.pairs if not each.trained_together), key=distance)[:2]


def _variance_of_unknown(pair: DraftedPair, fit: AcceptanceFit) -> float:
    is_unknown = {
        "size": pair.size_ratio is None,
        "temperature": pair.temperature is None,
        "code": pair.text is TextKind.any,
    }
    coefficients = dict(zip(FEATURES, fit.coefficients, strict=True))
    spreads = [SPREAD_OF_UNKNOWN[name] * coefficients[name] for name, holds in is_unknown.items() if holds]
    return _dot(spreads, spreads)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(first, second, strict=True))
