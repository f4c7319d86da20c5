"""The acceptance of a pair as a run measured it, with a range over prompts, as an entry for a file of pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from llama_ssp.planning.acceptance.pair import CONFIDENCE

_LEAST_ERROR = 0.01
"""Standard error that a range has at least: prompts of the same kind at another time."""


@dataclass(frozen=True, kw_only=True)
class AcceptedShare:
    """Accepted over examined drafted tokens, with the ends of an 80 % range over prompts of the same kind."""

    probability: float
    low: float
    high: float
    num_examined: int
    num_prompts: int


def accepted_share(prompts: Sequence[Sequence[tuple[int, int]]]) -> AcceptedShare | None:
    """The acceptance by the rounds of each prompt, as pairs of accepted and examined tokens; None without any.

    The range is that of a ratio of two sums over prompts, and never narrower than the tokens alone make it.

    Source: Cochran 1977, "Sampling techniques", section 6.4.
    """
    sums = [(sum(got for got, _ in rounds), sum(examined for _, examined in rounds)) for rounds in prompts if rounds]
    num_accepted, num_examined = (sum(each[place] for each in sums) for place in (0, 1))
    if not num_examined:
        return None
    probability = num_accepted / num_examined
    error = math.sqrt(probability * (1 - probability) / num_examined)
    if len(sums) > 1:
        squares = sum((got - probability * examined) ** 2 for got, examined in sums)
        error = max(error, math.sqrt(squares * len(sums) / (len(sums) - 1)) / num_examined)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * max(error, _LEAST_ERROR)
    return AcceptedShare(
        probability=probability,
        low=max(probability - half, 0.0),
        high=min(probability + half, 1.0),
        num_examined=num_examined,
        num_prompts=len(sums),
    )
