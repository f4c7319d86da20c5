"""The x axis of a chart over runs: where each value of a setting stands, and the name under it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from llama_ssp.reports.sweeps.varying import Setting, is_number

LEAST_GAP = 0.04
"""Closest neighbours on an axis of numbers, as a share of its length; their names would cover each other."""
MARGIN = 0.1
"""Empty part on either side."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting as an axis from 0 to 1.

    Attributes:
        is_line: values are numbers in order, so that lines may join them.
        places: of each run.
        names: what stands under each place.
    """

    label: str
    is_line: bool
    places: tuple[float, ...]
    names: dict[float, str]


def axis_of(setting: Setting) -> Axis:
    """Place numbers by their size, else by their logarithm if they crowd, else in equal steps, as other values are."""
    texts = setting.texts
    numbers = {text: float(value) for text, value in zip(texts, setting.values, strict=True) if is_number(value)}
    scales = _scales(numbers) if setting.is_number else []
    spaced = next((scale for scale in scales if _least_gap(scale.values()) >= LEAST_GAP), None)
    if spaced is None:
        order = sorted(dict.fromkeys(texts), key=lambda text: (text not in numbers, numbers.get(text, 0.0)))
        spaced = {text: number / max(len(order) - 1, 1) for number, text in enumerate(order)}
    place = {text: MARGIN + (1 - 2 * MARGIN) * share for text, share in spaced.items()}
    return Axis(
        label=setting.name, is_line=setting.is_number, places=tuple(place[text] for text in texts),
        names={place[text]: text for text in sorted(place, key=lambda text: place[text])},
    )  # fmt: skip


def _scales(numbers: dict[str, float]) -> list[dict[str, float]]:
    """The numbers by size and, if all are positive, by logarithm, each from 0 to 1."""
    found = [numbers]
    if min(numbers.values()) > 0:
        found.append({text: math.log(number) for text, number in numbers.items()})
    scaled = []
    for scale in found:
        low, reach = min(scale.values()), max(scale.values()) - min(scale.values())
        scaled.append({text: (value - low) / reach if reach else 0.5 for text, value in scale.items()})
    return scaled


def _least_gap(places: Iterable[float]) -> float:
    ordered = sorted(places)
    return min((right - left for left, right in pairwise(ordered)), default=1.0)


def run_numbers(num_runs: int) -> Setting:
    """The numbers of the runs in the table, for runs whose settings are the same."""
    return Setting(key="run", name="run", values=tuple(range(num_runs)))


def axes_of(settings: Sequence[Setting], *, num_runs: int) -> list[Setting]:
    """The settings that become axes: all numbers, else the one with the most values, else the runs' numbers.

    The seed is an axis only if nothing else varies: runs that differ in it are repeats. Numbers with another value,
    such as K = auto, are an axis too, in equal steps.
    """
    others = [setting for setting in settings if setting.key != "seed"] or [*settings]
    numbers = [setting for setting in others if any(map(is_number, setting.values))]
    if numbers:
        return numbers
    if others:
        return [max(others, key=lambda setting: len(set(setting.texts)))]
    return [run_numbers(num_runs)]
