"""Judges sums over texts that have expectation 0 if the texts have the target's distribution; without torch.

`law` computes the sums. Most scores need the text alone: given the tokens before it and where the round began, each
token has the target's probabilities. Scores of tokens after a rejection need the residual, whose probabilities a
resampled token has whatever was rejected. The sum of a score over all tokens is a martingale with a known variance: the
sum of the variances that the target's own probabilities give at each token. Bernstein's inequality for martingales
bounds how improbable a sum is, even if it consists of few and rare tokens, as with the proposals of an n-gram draft.
"""

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from llama_ssp.settings.rules import DEFAULT

BIASES = (0.95, 1.05)
BLOCK, CERTAIN = "block", ""
"""The rule that verifies blocks, and the rule for drafts without probabilities."""
FAULTS = {
    "a residual drawn from the target": (DEFAULT, BLOCK),
    "a residual that forgets the block's weight": (BLOCK,),
    "a residual that shares the draft's uniforms": (DEFAULT, BLOCK),
    "a residual that shares the draft's race": (DEFAULT, BLOCK),
    **{f"acceptance uniforms x {factor:g}": (DEFAULT,) for factor in BIASES},
    "drafts drawn in bf16": (DEFAULT,),
    "a rejected sibling kept in the draft's law": (),
    "penalties that forget drafted tokens": (),
    "a bonus token drawn from the draft": (),
}
"""Faults, with the rules under which a node with one child can have them; the last three depend on other things."""
RESIDUALS = (*FAULTS,)[:4]
TEXT_SCORES = (
    *FAULTS,
    "log target minus log draft",
    "log draft",
    "acceptance",
    "surprise",
    "repeated token",
    "place in the vocabulary",
    "drift of places",
    "place of the first token of a round",
)
SCORES = (*TEXT_SCORES, *(f"after a rejection, {fault}" for fault in RESIDUALS))
_LEAST_VARIANCE = 1.0
"""The least variance of a sum: rounding may change a few tokens even if the target is certain of all of them."""
_NUM_ERRORS = 5.0
_LEAST_SHIFT, _NO_VARIANCE = 1e-3, 1e-6
"""Values below which there is only rounding: a shift in standard deviations, and the variance of a constant score."""


class Role(IntEnum):
    """Ways in which a token came about."""

    unused = 0
    """The first token of a text, which no draft precedes, and positions after the end."""
    accepted = 1
    resampled = 2
    """Drawn from the residual, in place of a rejected token."""
    bonus = 3
    """Drawn after all drafted tokens were accepted."""
    other = 4
    """A token of a round without a draft, or whose draft is not judged."""
    hidden = 5
    """A token of a text that does not say where its rounds begin."""


def roles_of(
    accepted_lengths: Sequence[int], examined_lengths: Sequence[int], *, num_tokens: int, overlaps: bool = False
) -> list[Role]:
    """The roles of a text's tokens, from the lengths of its rounds; all `other` if rounds overlap."""
    roles = [Role.unused]
    for num_accepted, num_examined in zip(accepted_lengths, examined_lengths, strict=True):
        of_round = [Role.accepted] * num_accepted
        of_round += [Role.resampled if num_accepted < num_examined else Role.bonus]
        roles += of_round if num_examined else [Role.other] * len(of_round)
    roles = [Role.unused] if overlaps else roles
    return (roles + [Role.other] * num_tokens)[:num_tokens]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Drafting and verification of the texts' rounds, as far as scores and faults depend on them.

    Attributes:
        rule: the name of the rule, or CERTAIN.
        widths: of a tree, how many children a node has, level by level; empty for a chain.
        sees_rejections: whether the residual is known up to rounding in fp32: the draft's probabilities are a function
            of the text, and both models compute in fp32.
        penalizes: whether the target's probabilities depend on which tokens were drafted before.
        num_known: for how many tokens of a round, from the first on, the draft's probabilities follow from the text
            before them; one for a head, which drafts the second token from its own output for the first.
        longest: K of texts that hide their rounds; how far a fault moves them follows from where rounds may begin.
    """

    rule: str = DEFAULT
    widths: tuple[int, ...] = ()
    sees_rejections: bool = False
    penalizes: bool = False
    num_known: int = sys.maxsize
    longest: int = 1


ANY_ROUNDS = Rounds()


class TextSums(NamedTuple):
    """The sums of one text; lists have a number for each of `SCORES`.

    Attributes:
        values: sums of the scores, minus their expectations.
        variances: variances of the values, as they follow from the target's probabilities.
        reaches: the most by which one token can move a value.
        ranges: the most by which a law at total variation 1 moves the values on average: the sums of score ranges.
        shifts: what each of `FAULTS` adds to the values on average; 0 for faults that such rounds cannot have.
        drifts: what the probabilities that the text's maker states add to the values on average.
    """

    values: Sequence[float]
    variances: Sequence[float]
    reaches: Sequence[float]
    ranges: Sequence[float]
    shifts: Sequence[Sequence[float]]
    drifts: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A score's sum over all texts."""

    value: float
    variance: float
    reach: float
    range: float
    shifts: tuple[float, ...]

    def beyond(self, most: float) -> "Sum":
        """Subtract from the sum, and from what faults add, the most that something else may have added."""

        def left(value: float) -> float:
            return math.copysign(max(abs(value) - most, 0.0), value)

        return replace(self, value=left(self.value), shifts=tuple(map(left, self.shifts)))

    @property
    def varies(self) -> bool:
        """Whether the score depends on the token at all, in rounds like these."""
        return self.variance > _NO_VARIANCE

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.value / math.sqrt(max(self.variance, _LEAST_VARIANCE))

    @property
    def p_value(self) -> float:
        """An upper bound of the probability that a sum is at least this far from 0, in either direction.

        Source: Freedman 1975, "On tail probabilities for martingales".
        """
        spread = max(self.variance, _LEAST_VARIANCE) + self.reach * abs(self.value) / 3
        return min(1.0, 2 * math.exp(-(self.value**2) / (2 * spread)))

    def power(self, fault: int, *, least_p: float) -> float:
        """Return the probability that a fault makes the p-value at most `least_p`; see `TextSums.shifts`."""
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
            range=sum(text.ranges[place] for text in given),
            shifts=tuple(sum(text.shifts[fault][place] for text in given) for fault in range(len(FAULTS))),
        )
        for place, name in enumerate(SCORES)
    }


def roundings(stated: Sequence[TextSums], num_texts: int) -> dict[str, float]:
    """Return the most by which the maker's law may have moved the sums of texts.

    It is estimated from the texts whose probabilities the maker has stated. The other texts count with the mean of
    these, and with five standard errors of the mean and of their sum.
    """
    found, num, left = dict[str, float](), len(stated), num_texts - len(stated)
    for place, name in enumerate(SCORES):
        drifts = [text.drifts[place] for text in stated]
        spread = stdev(drifts) if num > 1 else 0.0
        found[name] = abs(num_texts * fmean(drifts)) + _NUM_ERRORS * spread * math.sqrt(left + left**2 / num)
    return found


def moves(sums: Collection[Sum]) -> dict[str, float]:
    """Return, for each fault that these rounds can have, by how many standard errors it moves its clearest sum."""
    errors = [[abs(shift) / math.sqrt(max(text.variance, _LEAST_VARIANCE)) for shift in text.shifts] for text in sums]
    moved = {fault: max(of_fault) for fault, of_fault in zip(FAULTS, zip(*errors, strict=True), strict=False)}
    return {fault: most for fault, most in moved.items() if most > _LEAST_SHIFT}


def powers(sums: Collection[Sum], *, least_p: float) -> dict[str, float]:
    """Return, for each fault that these rounds can have, the probability that the best of the sums finds it."""
    places = {fault: place for place, fault in enumerate(FAULTS)}
    return {fault: max(text.power(places[fault], least_p=least_p) for text in sums) for fault in moves(sums)}
