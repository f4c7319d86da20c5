"""Looks up pairs with a figure of their own: the user's, what `task=latency` measured, and the package's.

Every folder of options may have `pairs.yaml`, written by hand, and `measured_pairs.yaml`, which `store` writes.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llama_ssp.config import folders
from llama_ssp.errors import ConfigError, SspError, one_message
from llama_ssp.planning.acceptance.fitted import around
from llama_ssp.planning.acceptance.pair import Acceptance, DraftedPair

PAIRS, MEASURED = "pairs.yaml", "measured_pairs.yaml"
_HEAD = (
    "# Acceptance of pairs as measured here: written by task=latency with task.store=true. pairs.yaml comes first.\n"
)


def known(pair: DraftedPair) -> Acceptance | None:
    """The figure of a pair, or of its draft with any target; quantized models have the figure of their base.

    Of figures at several temperatures, the nearest is taken. None if no file has one; a file without the form of the
    package's raises ConfigError.
    """
    files, names = _files(tuple(folders.folders())), _base(pair.target, pair.draft)
    for content in files:
        entries = [entry for entry in content.get("pairs", []) if _names(entry) == names]
        if entries:
            return _acceptance(min(entries, key=lambda entry: _distance(entry, pair)))
    for content in files:
        if entry := content.get("drafts", {}).get(pair.draft):
            return _acceptance(entry)
    defaults = (content["default"] for content in files if "default" in content)
    return next(map(_acceptance, defaults), None)


def store(entry: Mapping[str, Any]) -> Path:
    """Write a measured pair to the user's own file in place of an earlier one at its temperature; returns the file.

    Raises SspError if it cannot be written, ConfigError if the file is there and has another form.
    """
    file = folders.user_dir() / MEASURED
    old = _read(file).get("pairs", []) if file.is_file() else []
    kept = [each for each in old if _key(each) != _key(entry)]
    text = yaml.safe_dump({"pairs": [*kept, dict(entry)]}, sort_keys=False, allow_unicode=True, width=160)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_HEAD + text, encoding="utf-8")
    except OSError as error:
        raise SspError(f"{file} cannot be written ({error.strerror}): make its folder writable") from error
    _files.cache_clear()
    return file


def _key(entry: Mapping[str, Any]) -> tuple[object, ...]:
    return entry["target"], entry["draft"], entry.get("temperature")


def _names(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["target"], entry["draft"]


def _base(target: str, draft: str) -> tuple[str, str]:
    return target.removesuffix("_8bit"), draft.removesuffix("_8bit")


def _distance(entry: Mapping[str, Any], pair: DraftedPair) -> float:
    """How far a figure's temperature is from the pair's; 0 where one is not known."""
    known_at = entry.get("temperature")
    return abs(known_at - pair.temperature) if known_at is not None and pair.temperature is not None else 0.0


def _acceptance(entry: Mapping[str, Any]) -> Acceptance:
    probability = float(entry["acceptance"])
    low, high = around(probability)
    return Acceptance(
        probability=probability, source=entry["source"], low=entry.get("low", low), high=entry.get("high", high)
    )


@cache
def _files(where: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Read the files of several folders, the first to be asked first."""
    named = [folder / name for folder in where for name in (PAIRS, MEASURED)]
    return [_read(file) for file in named if file.is_file()]


def _read(file: Path) -> dict[str, Any]:
    content = folders.read(file)
    if problems := list(_problems(content)):
        raise ConfigError(f"{folders.shown(file)}: {one_message(problems)}")
    for entry in _entries(content).values():
        entry.setdefault("source", folders.shown(file))
    return content


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a file of pairs."""
    parts = {"pairs": list, "drafts": dict, "default": dict}
    yield from (f"{key} is none of {', '.join(parts)}" for key in content if key not in parts)
    wrong = [key for key, kind in parts.items() if not isinstance(content.get(key, kind()), kind)]
    yield from (f"{key} must have the form that conf/pairs.yaml shows" for key in wrong)
    for name, entry in () if wrong else _entries(content).items():
        figures = _figures(entry)
        if figures is None:
            yield f"{name} needs an acceptance between 0 and 1, such as acceptance: 0.8"
        elif figures != sorted(figures):
            yield f"{name} needs low <= acceptance <= high, the ends of its range"
        elif name.startswith("pair ") and not all(isinstance(entry.get(key), str) for key in ("target", "draft")):
            yield f"{name} needs target and draft, two names of models"
        elif not isinstance(entry.get("temperature", 0.0), int | float):
            yield f"{name} has temperature: {entry['temperature']}, which must be a number, such as 0.8"


def _figures(entry: object) -> list[float] | None:
    """The acceptance between the ends of its range; None if one is no probability."""
    if not isinstance(entry, dict) or "acceptance" not in entry:
        return None
    found = [entry[key] for key in ("low", "acceptance", "high") if key in entry]
    return found if all(isinstance(each, int | float) and 0 <= each <= 1 for each in found) else None


def _entries(content: Mapping[str, Any]) -> dict[str, Any]:
    """Name all entries of a file for messages."""
    pairs = {f"pair {number}": entry for number, entry in enumerate(content.get("pairs", []), start=1)}
    drafts = {f"draft {name}": entry for name, entry in content.get("drafts", {}).items()}
    return pairs | drafts | ({"default": content["default"]} if "default" in content else {})
