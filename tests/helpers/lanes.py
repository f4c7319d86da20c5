"""Which cases of a table run always, and which wait for the heavy lane."""

from collections.abc import Sequence
from enum import Enum
from itertools import combinations, product

import pytest
import torch

Case = tuple[int, ...]


def heavy(*values: object) -> object:
    """One case that runs with --heavy alone."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def slow(*values: object) -> object:
    """One case that runs with --slow alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def grid(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """All combinations of some arguments.

    A few of them, in which every two values of different arguments meet, run always. The others run with --heavy.
    """
    cases: list[Case] = list(product(*(range(len(values)) for values in axes.values())))
    always = _pairwise(cases)
    chosen = [tuple(values[place] for values, place in zip(axes.values(), case, strict=True)) for case in cases]
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(*c, marks=() if each in always else pytest.mark.heavy)
            for each, c in zip(cases, chosen, strict=True)
        ],
        ids=_name,
    )


def _pairwise(cases: Sequence[Case]) -> set[Case]:
    """Choose cases until every pair of values has occurred: always the one with the most new pairs."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen: set[Case] = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _name(value: object) -> str | None:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__name__", None)
