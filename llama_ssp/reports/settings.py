"""The settings that differ between runs, and their names.

A sweep over `model=` changes every figure of the model's entry too: settings that follow from a name are left out, so
that a reader finds the name alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_ssp.reports.runs import Run
from llama_ssp.words import visible

MISSING = ""
"""Value of a setting that a run does not have."""
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting that differs between runs: its dotted key, a short name of its own, and its value in each run."""

    key: str
    name: str
    values: tuple[object, ...]

    @property
    def texts(self) -> list[str]:
        """Its values as a user writes them, shortened."""
        return [_shown(value) for value in self.values]


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
    named = [[f"{setting.name}={text}" for text in setting.texts] for setting in settings]
    return [", ".join(of_run) for of_run in zip(*named, strict=True)]


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
