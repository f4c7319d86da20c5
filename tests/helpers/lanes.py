"""Which cases of a table run always, and which wait for the heavy lane."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import combinations, product
from typing import Any, TypeVar

import pytest
import torch

Case = tuple[int, ...]
Chosen = TypeVar("Chosen")


def heavy(*values: object) -> object:
    """One case that runs with --heavy alone."""
    return pytest.param(*values, marks=pytest.mark.heavy)


def slow(*values: object) -> object:
    """One case that runs with --slow alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def first(values: Iterable[object], *, num: int = 1) -> list[object]:
    """The first values of one argument run always, and the others with --heavy."""
    return [value if place < num else heavy(value) for place, value in enumerate(values)]


def sample(values: Iterable[str], *, always: Collection[str], every: int = 12) -> list[object]:
    """Some values run always; of the others one in so many with --heavy, and the rest with --slow."""
    others = [value for value in values if value not in always]
    return [*sorted(always), *(slow(value) if place % every else heavy(value) for place, value in enumerate(others))]


def grid(*, where: Callable[..., bool] = lambda **_: True, **axes: Sequence[object]) -> pytest.MarkDecorator:
    """All combinations of some arguments: as `pairs`, and those that `pairs` leaves out run with --slow."""
    return _cases(axes, dict.fromkeys(_chosen(axes, where), pytest.mark.slow) | _lanes(axes, where))


def pairs(*, where: Callable[..., bool] = lambda **_: True, **axes: Sequence[object]) -> pytest.MarkDecorator:
    """Combinations of some arguments: every value is in one that runs always, every two values meet with --heavy.

    Combinations are those `where` this is true, if there is one.
    """
    return _cases(axes, _lanes(axes, where))


def meeting(values: Sequence[str], parts: Callable[[str], Collection[str]], *, always: int) -> list[object]:
    """The first values run always; whatever two parts are in one value are so with --heavy; the rest is for --slow."""
    chosen = _cover({value: set(combinations(sorted(parts(value)), 2)) for value in values}, values[:always])
    others = [heavy(value) if value in chosen else slow(value) for value in values[always:]]
    return [*values[:always], *others]


def _lanes(axes: Mapping[str, Sequence[object]], where: Callable[..., bool]) -> dict[Case, Any]:
    """The marks of the cases in which values meet; all cases of two arguments."""
    meeting = _covering(_chosen(axes, where), 2)
    return dict.fromkeys(meeting, pytest.mark.heavy) | dict.fromkeys(_covering(meeting, 1), ())


def _chosen(axes: Mapping[str, Sequence[object]], where: Callable[..., bool]) -> list[Case]:
    return [
        case
        for case in product(*(range(len(values)) for values in axes.values()))
        if where(**{name: values[place] for (name, values), place in zip(axes.items(), case, strict=True)})
    ]


def _cases(axes: Mapping[str, Sequence[object]], marks: Mapping[Case, Any]) -> pytest.MarkDecorator:
    chosen = {case: [values[place] for values, place in zip(axes.values(), case, strict=True)] for case in marks}
    return pytest.mark.parametrize(
        tuple(axes), [pytest.param(*values, marks=marks[case]) for case, values in chosen.items()], ids=_name
    )


def _covering(cases: Sequence[Case], num_values: int) -> list[Case]:
    """Choose cases until each so many values that are together in one have occurred: always the one with most new."""
    return sorted(_cover({case: set(combinations(enumerate(case), num_values)) for case in cases}))


def _cover(found: Mapping[Chosen, set[Any]], chosen: Sequence[Chosen] = ()) -> list[Chosen]:
    """Choose keys beside those chosen until all that is found in any is in one: always the key with most new."""
    more = [*chosen]
    missing = set().union(*found.values()).difference(*(found[key] for key in chosen))
    while missing:
        more.append(max(found, key=lambda key: len(found[key] & missing)))
        missing -= found[more[-1]]
    return more


def _name(value: object) -> str | None:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__name__", None)
