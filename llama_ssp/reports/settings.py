"""The settings that differ between runs: found, named, and as axes of charts.

A sweep over `model=` changes every figure of the model's entry too: settings that follow from a name are left out, so
that a reader finds the name alone.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeGuard

from llama_ssp.reports.folder import Run
from llama_ssp.words import visible

MISSING = ""
"""Value of a setting that a run does not have."""
LEAST_GAP = 0.04
"""Closest neighbours on an axis of numbers, as a share of its length; their names would cover each other."""
_NEVER_SHOWN = {"run_dir", "dry_run"}
_NAMES = {
    "speculation.num_draft_tokens": "K", "hardware.name": "hardware", "placement.target.kind": "placement",
    "placement.draft.kind": "draft placement",
}  # fmt: skip
_ENTRIES = (
    ("model.", "model"), ("draft.", "draft"), ("hardware.", "hardware.name"),
    ("task.", "task"), ("task.", "task.suite"),
)  # fmt: skip
"""Groups whose entries fix several settings, and the settings that name the entry."""
_DESCRIPTION = re.compile(
    r"hardware\.|(draft\.)?model\.(hub_id|revision|shipped|stored_dtype|gpu_dtype|default_draft|chat|gated|shape\b)"
)
"""Fields of an entry that describe it and that nobody sweeps."""
_LONGEST_TEXT = 40
_MOST = 1e100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that differs between runs: its dotted key, a short name of its own, and its value in each run."""

    key: str
    name: str
    values: tuple[object, ...]

    @property
    def is_number(self) -> bool:
        """Whether every run has a number, so that a chart can have it as an axis."""
        return all(is_number(value) for value in self.values)

    @property
    def texts(self) -> list[str]:
        """Its values as a user writes them, shortened."""
        return [_shown(value) for value in self.values]


class Axis(NamedTuple):
    """A setting as an axis from 0 to 1.

    Attributes:
        is_line: values are numbers in order, so that lines may join them.
        places: of each run.
        names: the text under each place.
    """

    label: str
    is_line: bool
    places: tuple[float, ...]
    names: dict[float, str]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not (isinstance(value, float) and math.isnan(value)) and abs(value) < _MOST


def varying_settings(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings that differ between runs, in the order of the first run that has them.

    The seed stands last, since runs that differ in it are repeats.
    """
    facts = [run.facts for run in runs]
    keys = dict.fromkeys(key for run in facts for key in run if key not in _NEVER_SHOWN)
    columns = {key: tuple(run.get(key, MISSING) for run in facts) for key in keys}
    changing = {key: values for key, values in columns.items() if len(set(map(_identity, values))) > 1}
    kept = sorted((key for key in changing if not _follows(key, changing)), key=lambda key: key == "seed")
    return [Setting(key=key, name=_short_name(key, kept), values=changing[key]) for key in kept]


def labels(settings: Sequence[Setting]) -> list[str]:
    """Return a label for each run: its own values of the settings."""
    named = [[f"{each.name}={text}" for text in each.texts] for each in settings]
    return [", ".join(of_run) for of_run in zip(*named, strict=True)]


def axes_of(settings: Sequence[Setting], *, num_runs: int) -> list[Setting]:
    """The settings that become axes: all numbers, else the one with the most values, else the runs' numbers.

    The seed is an axis only if nothing else varies: runs that differ in it are repeats. Numbers with another value,
    such as K = auto, are an axis too, in equal steps.
    """
    others = [setting for setting in settings if setting.key != "seed"] or [*settings]
    if numbers := [setting for setting in others if any(map(is_number, setting.values))]:
        return numbers
    if others:
        return [max(others, key=lambda setting: len(set(setting.texts)))]
    return [Setting(key="run", name="run", values=tuple(range(num_runs)))]


def axis_of(setting: Setting) -> Axis:
    """Place numbers by their size, else by their logarithm if they crowd, else in equal steps, as other values are."""
    texts = setting.texts
    numbers = {text: float(value) for text, value in zip(texts, setting.values, strict=True) if is_number(value)}
    order = sorted(dict.fromkeys(texts), key=lambda text: (text not in numbers, numbers.get(text, 0.0)))
    scales = [{text: float(place) for place, text in enumerate(order)}]
    if setting.is_number:
        is_positive = min(numbers.values()) > 0
        logarithms = [{text: math.log(number) for text, number in numbers.items()}] if is_positive else []
        scales = [numbers, *logarithms, *scales]
    for scale in scales:
        low, reach = min(scale.values()), max(scale.values()) - min(scale.values())
        shares = {text: (value - low) / reach if reach else 0.5 for text, value in scale.items()}
        if min((right - left for left, right in pairwise(sorted(shares.values()))), default=1.0) >= LEAST_GAP:
            break
    names = {shares[text]: text for text in order}
    return Axis(setting.name, setting.is_number, tuple(shares[text] for text in texts), names)


def _identity(value: object) -> str:
    return json.dumps(value, default=str)


def _shown(value: object) -> str:
    text = visible(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else _identity(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _follows(key: str, changing: Mapping[str, tuple[object, ...]]) -> bool:
    """Whether a setting follows from the name of an entry that changes: a description, or what other entries lack."""
    if key in {name for _, name in _ENTRIES} or not (_DESCRIPTION.match(key) or MISSING in changing[key]):
        return False
    return any(key.startswith(group) and name in changing for group, name in _ENTRIES)


def _short_name(key: str, keys: Sequence[str]) -> str:
    """Return the shortest ending of a key that no other key has."""
    if key in _NAMES:
        return _NAMES[key]
    parts, others = key.split("."), [other.split(".") for other in keys if other != key]
    num = next(n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others))
    return visible(" ".join(parts[-num:]).replace("_", " "))
