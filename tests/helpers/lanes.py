"""Which cases of a table run always, and which wait for the heavy lane."""

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import combinations, product
from typing import Any

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

    A few of them, in which every two values of different arguments meet, run always. The others run with --slow.
    """
    always = set(_pairwise(axes))
    return _cases(axes, {case: () if case in always else pytest.mark.slow for case in _product(axes)})


def pairs(**axes: Sequence[object]) -> pytest.MarkDecorator:
    """A few combinations of independent arguments: every two values of different ones meet."""
    return _cases(axes, dict.fromkeys(_pairwise(axes), ()))


def _product(axes: Mapping[str, Sequence[object]]) -> list[Case]:
    return [*product(*(range(len(values)) for values in axes.values()))]


def _cases(axes: Mapping[str, Sequence[object]], marks: Mapping[Case, Any]) -> pytest.MarkDecorator:
    chosen = {case: [values[place] for values, place in zip(axes.values(), case, strict=True)] for case in marks}
    return pytest.mark.parametrize(
        tuple(axes), [pytest.param(*values, marks=marks[case]) for case, values in chosen.items()], ids=_name
    )


def _pairwise(axes: Mapping[str, Sequence[object]]) -> list[Case]:
    """Choose cases until every pair of values has occurred: always the one with the most new pairs."""
    found = {case: set(combinations(enumerate(case), 2)) for case in _product(axes)}
    missing = set().union(*found.values())
    chosen: list[Case] = []
    while missing:
        chosen.append(max(found, key=lambda case: len(found[case] & missing)))
        missing -= found[chosen[-1]]
    return sorted(chosen)


def _name(value: object) -> str | None:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__name__", None)
