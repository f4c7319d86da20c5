"""Judges sums over texts that have expectation 0 if the texts have the target's distribution; without torch.

`sampling.law` computes them. The sum of a score over all tokens is a martingale, whose variance is known: the sum of
the variances that the target's own probabilities give at each token. Bernstein's inequality for martingales bounds how
improbable a sum is, also where few and rare tokens make it up, as with the proposals of an n-gram draft.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist

BIASES = (0.95, 1.05)
FAULTS = (
    "a residual drawn from the target", *(f"acceptance uniforms x {factor:g}" for factor in BIASES),
    "a bonus token drawn from the draft",
)  # fmt: skip
SCORES = (
    *(f"ratio to {fault}" for fault in FAULTS),
    "log target minus log draft", "log draft", "acceptance", "surprise", "repeated token", "place in the vocabulary",
    "drift of places", "place of the first token of a round",
)  # fmt: skip

_LEAST_VARIANCE = 1.0
"""Rounding may turn a few tokens, also where the target is certain of all of them."""


class Role(IntEnum):
    """How a token came about."""

    unused = 0
    """The first of a text, which no draft comes before, and what stands after the end."""
    drafted = 1
    """Accepted, or drawn from the residual in the place of a rejected one."""
    opening = 2
    """The same, first of its round. That it is the first was decided before it was drawn, by every rule."""
    bonus = 3
    """Drawn after a whole accepted draft."""
    other = 4
    """Of a round whose draft does not count, or without one."""


def roles_of(
    accepted_lengths: Sequence[int], examined_lengths: Sequence[int], *, num_tokens: int, overlaps: bool = False
) -> list[Role]:
    """The roles of a text's tokens, from the lengths of its rounds; those of rounds that overlap are all `other`."""
    roles = [Role.unused]
    for num_accepted, num_examined in zip(accepted_lengths, examined_lengths, strict=True):
        last = Role.drafted if num_accepted < num_examined else Role.bonus
        of_round = [Role.drafted] * num_accepted + [last]
        of_round[0] = Role.opening if of_round[0] is Role.drafted else last
        roles += of_round if num_examined else [Role.other] * len(of_round)
    roles = [Role.unused] if overlaps else roles
    return (roles + [Role.other] * num_tokens)[:num_tokens]


@dataclass(frozen=True, kw_only=True)
class TextSums:
    """The sums of one text; lists have a number for each of `SCORES`.

    Attributes:
        values: of the scores, minus their expectations.
        variances: of the values, as the target's probabilities give them.
        reaches: the farthest that one token can move a value.
        shifts: what each of `FAULTS` adds to the values on average, if each drafted token is verified by itself.
    """

    values: Sequence[float]
    variances: Sequence[float]
    reaches: Sequence[float]
    shifts: Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A score's sum over all texts."""

    value: float
    variance: float
    reach: float
    shifts: tuple[float, ...]

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.value / math.sqrt(max(self.variance, _LEAST_VARIANCE))

    @property
    def p_value(self) -> float:
        """A bound of the probability of a sum as far from 0, in either direction.

        Source: Freedman 1975, "On tail probabilities for martingales".
        """
        spread = max(self.variance, _LEAST_VARIANCE) + self.reach * abs(self.value) / 3
        return min(1.0, 2 * math.exp(-(self.value**2) / (2 * spread)))

    def power(self, fault: int, *, least_p: float) -> float:
        """The probability that a fault makes the p-value as small; see `TextSums.shifts`."""
        log = math.log(2 / least_p)
        of_reach, variance = log * self.reach / 3, max(self.variance, _LEAST_VARIANCE)
        needed = of_reach + math.sqrt(of_reach**2 + 2 * log * variance)
        return NormalDist().cdf((abs(self.shifts[fault]) - needed) / math.sqrt(variance))


def sums_of(texts: Iterable[TextSums]) -> dict[str, Sum]:
    """Add up the texts: a sum for each of `SCORES`."""
    given = list(texts)
    return {
        name: Sum(
            value=sum(text.values[place] for text in given),
            variance=sum(text.variances[place] for text in given),
            reach=max((text.reaches[place] for text in given), default=0.0),
            shifts=tuple(sum(text.shifts[fault][place] for text in given) for fault in range(len(FAULTS))),
        )
        for place, name in enumerate(SCORES)
    }


def powers(sums: Iterable[Sum], *, least_p: float, verifies_each: bool) -> dict[str, float]:
    """The probability that each of `FAULTS` is found by the best of the sums.

    If a rule does not verify each drafted token by itself, only that of a wrong bonus token is known.
    """
    given, known = list(sums), FAULTS if verifies_each else FAULTS[-1:]
    return {name: max(each.power(FAULTS.index(name), least_p=least_p) for each in given) for name in known}
