"""Finds the settings that differ between runs, and gives them short names; pure functions of settings.

`runs.Run.facts` supplies the settings of a run. A sweep over `model=` changes every figure of the model's entry too:
what follows from a name is left out, so that a reader finds the name alone.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

MISSING = ""
"""Value of a setting that a run does not have."""
_NEVER_SHOWN = {"run_dir", "dry_run"}
_NAMES = {
    "speculation.num_draft_tokens": "K", "hardware.name": "hardware", "placement.target.kind": "placement",
    "placement.draft.kind": "draft placement",
}  # fmt: skip
_ENTRIES = {
    "model.": ("model",),
    "draft.": ("draft",),
    "hardware.": ("hardware.name",),
    "task.": ("task", "task.suite"),
}
"""Groups whose entries fix several settings, and the settings that name the entry."""
_DESCRIPTION = re.compile(
    r"hardware\.|(draft\.)?model\.(hub_id|revision|shipped|stored_dtype|gpu_dtype|default_draft|chat|gated|shape\b)"
)
"""Fields of an entry that describe it and that nobody sweeps."""
_LONGEST_TEXT = 40
_MOST = 1e100


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that differs between runs.

    Attributes:
        key: its dotted key.
        name: a short name, unlike those of the others.
        values: its value in each run.
    """

    key: str
    name: str
    values: tuple[object, ...]

    @property
    def is_number(self) -> bool:
        """Whether every run has a number, so that a chart can have it as an axis."""
        return all(is_number(value) for value in self.values)

    @property
    def texts(self) -> list[str]:
        """Its values as a user writes them."""
        return [shown(value) for value in self.values]


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return not (isinstance(value, float) and math.isnan(value)) and abs(value) < _MOST


def shown(value: object) -> str:
    """Return a value as a user writes it, shortened."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def varying(runs: Sequence[Mapping[str, object]]) -> list[Setting]:
    """Return the settings that differ between these runs, in the order of the first run that has them."""
    columns = {
        key: tuple(run.get(key, MISSING) for run in runs)
        for key in dict.fromkeys(key for run in runs for key in run)
        if key not in _NEVER_SHOWN
    }
    changing = {key: values for key, values in columns.items() if len(set(map(_identity, values))) > 1}
    kept = [key for key in changing if not _follows(key, changing)]
    return [Setting(key=key, name=name, values=changing[key]) for key, name in zip(kept, _names(kept), strict=True)]


def labels(settings: Sequence[Setting]) -> list[str]:
    """Return a label for each run: its own values of the settings."""
    num_runs = len(settings[0].values) if settings else 0
    return [", ".join(f"{each.name}={each.texts[run]}" for each in settings) for run in range(num_runs)]


def _identity(value: object) -> str:
    return json.dumps(value, default=str)


def _follows(key: str, changing: Mapping[str, tuple[object, ...]]) -> bool:
    """Whether a setting follows from the name of an entry: a description, or one that other entries do not have."""
    group = next((prefix for prefix in _ENTRIES if key.startswith(prefix)), None)
    if group is None or key in _ENTRIES[group]:
        return False
    values = changing[key]
    if not _DESCRIPTION.match(key) and MISSING not in values:
        return False
    entries = zip(*(changing[name] for name in _ENTRIES[group] if name in changing), strict=True)
    of_entry: dict[str, str] = {}
    return all(
        of_entry.setdefault(_identity(entry), _identity(value)) == _identity(value)
        for entry, value in zip(entries, values, strict=False)
    ) and bool(of_entry)


def _names(keys: Sequence[str]) -> list[str]:
    """Return the shortest ending of each key that no other key has."""
    names = []
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        num = next(n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others))
        names.append(_NAMES.get(key, " ".join(parts[-num:]).replace("_", " ")))
    return names
