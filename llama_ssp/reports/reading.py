"""Reads JSON and YAML of a run folder back, checking every field's type, every number's size and all nesting.

A run folder may be damaged, edited or made by somebody else. Values that pass can be summed, printed and drawn without
further checks: no NaN or infinity, no list in place of a number, no endless nesting. Messages truncate their quotes.
"""

import json
import math
import reprlib
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

MOST_BYTES = 64 << 20
"""Largest `summary.json`."""
MOST_CHARS = 1 << 20
"""Longest `config.yaml`."""
MOST, LEAST = 2.0**63, 1e-30
"""Bounds of numbers in a record, larger than any seed, size or time; 0 is allowed."""
MOST_DEPTH = 32
"""Deepest nesting of a config, and where a record does not specify types."""
_SIGNED = {"other_s", "other_share", "value", "low", "high"}
"""Differences: of a whole and its parts, slightly negative if the parts were rounded up, and those of an evaluation."""
_MOST_REPEATED, _MOST_CHANGED, _MOST_SHOWN_CHARS = 4, 10, 200
"""Most repeated lines and changed settings that are named, and most characters shown of each value."""


class _HasKey(Protocol):
    @property
    def key(self) -> Hashable: ...


_Record = TypeVar("_Record")
Keyed = TypeVar("Keyed", bound=_HasKey)


def read_json(text: str | bytes) -> object:
    """Read JSON; raises ValueError if it is malformed, has NaN or infinity, or is nested too deep."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_lines(whole: bytes, parse: Callable[[bytes], Keyed]) -> list[Keyed]:
    """Read the lines of a file; ValueError names those that cannot be read, or have the key of an earlier one."""
    found: dict[Hashable, tuple[int, Keyed]] = {}
    repeated = []
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if not line:
            continue
        try:
            entry = parse(line)
        except ValueError as error:
            raise ValueError(f"line {number} is damaged: {error}") from None
        if entry.key in found:
            repeated.append(f"line {number} repeats line {found[entry.key][0]}")
        found.setdefault(entry.key, (number, entry))
    if repeated:
        more = f" and {len(repeated) - _MOST_REPEATED} more" if len(repeated) > _MOST_REPEATED else ""
        raise ValueError(", ".join(repeated[:_MOST_REPEATED]) + more)
    return [entry for _, entry in found.values()]


def restore(kind: type[_Record], content: object, *, where: str = "") -> _Record:
    """Build a dataclass record from parsed JSON; raises ValueError that names the first wrong field, after `where`.

    Fields have simple types; those with a default may be missing.
    """
    hints, needed = _fields_of(cast("Hashable", kind))
    if not isinstance(content, Mapping) or not needed <= content.keys() <= hints.keys():
        of_what = f"of {where.removesuffix('.')} " if where else ""
        raise ValueError(f"its fields {of_what}should be {', '.join(hints)}")
    return kind(**{name: _restored(hints[name], value, where=f"{where}{name}") for name, value in content.items()})


@cache
def _fields_of(kind: Hashable) -> tuple[dict[str, Any], set[str]]:
    """Return the types of all fields, and the names of those without a default."""
    assert isinstance(kind, type)
    assert is_dataclass(kind)
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    return get_type_hints(kind), needed


def _restored(expected: Any, value: object, *, where: str) -> object:  # noqa: ANN401 - a type as annotations have it
    origin, parts = get_origin(expected), get_args(expected)
    if origin is UnionType:
        if value is None:
            return None
        return _restored(next(part for part in parts if part is not type(None)), value, where=where)
    if origin is list and isinstance(value, list):
        return [_restored(parts[0], item, where=f"{where}[{place}]") for place, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: _restored(parts[1], item, where=f"{where}.{name[:40]}") for name, item in value.items()}
    if isinstance(expected, type) and is_dataclass(expected):
        return restore(expected, value, where=f"{where}.")
    if not _fits(expected, value, signed=where.rpartition(".")[2] in _SIGNED):
        raise ValueError(f"{where} holds {reprlib.repr(value)}")
    return value


def _fits(expected: object, value: object, *, signed: bool) -> bool:
    if expected is Any:
        return _is_shallow(value, MOST_DEPTH)
    if expected is float and type(value) in (int, float):
        assert isinstance(value, int | float)
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return value == 0 or (LEAST < abs(value) < MOST and (signed or value > 0))
    if expected is int and type(value) is int:
        return 0 <= value < MOST
    return type(value) is expected


def is_storable(value: object) -> bool:
    """Whether a record can hold a value of any type, parsed from JSON, and be read back."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:  # 1e999 is infinity to Python's parser
        return False
    return _is_shallow(value, MOST_DEPTH - 1)


def _is_shallow(value: object, most: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or (most > 0 and all(_is_shallow(item, most - 1) for item in value))


def read_settings(text: str) -> dict[str, object]:
    """Read a `config.yaml`: the value of every leaf by its dotted key; a list is a leaf.

    Raises ValueError for invalid YAML, and if it is too large, too deep or has aliases, which expand without end.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has {len(text)} characters")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it is nested too deep, or has aliases")
        return _flat(yaml.safe_load(text))
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError("it is not YAML") from error  # odd tags and numbers raise these other errors in the library


def changed_settings(old_yaml: str, new_yaml: str, *, changeable: Collection[str]) -> list[str]:
    """Describe each changed setting in a clause; raises ValueError if one of the texts cannot be read.

    A list that the old text lacks was empty. Keys in `changeable`, and all below them, may differ.
    """
    old, new = read_settings(old_yaml), read_settings(new_yaml)
    old = {key: value for key, value in new.items() if value == []} | old
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(f"{key}.".startswith(f"{parent}.") for parent in changeable)
    ]

    def shown(settings: Mapping[str, object], key: str) -> str:
        return _cut(json.dumps(settings.get(key), default=str))

    clauses = [f"{_cut(key)} was {shown(old, key)} and is now {shown(new, key)}" for key in changed[:_MOST_CHANGED]]
    return clauses + ([f"{len(changed) - _MOST_CHANGED} more"] if len(changed) > _MOST_CHANGED else [])


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."
