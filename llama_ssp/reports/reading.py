"""Reads JSON of a run back into records, checking every field's type and every number's size.

A run folder may be damaged, edited or made by somebody else. What passes here can be summed, printed and drawn without
further checks: no NaN or infinity, no list in place of a number, no endless nesting.
"""

import json
import math
import reprlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

MOST_BYTES = 64 << 20
"""Largest `summary.json`."""
MOST, LEAST = 2.0**63, 1e-30
"""Bounds of numbers in a record, larger than any seed, size or time; 0 is allowed."""
MOST_DEPTH = 32
"""Deepest nesting where a record does not specify types."""
_SIGNED = {"other_s", "other_share", "value", "low", "high"}
"""Differences: of a whole and its parts, slightly negative if the parts were rounded up, and those of an evaluation."""

_MOST_NAMED = 4
"""Most repeated lines that are named."""


class _HasKey(Protocol):
    @property
    def key(self) -> Hashable: ...


_Record = TypeVar("_Record")
Keyed = TypeVar("Keyed", bound=_HasKey)


def read_json(text: str | bytes) -> object:
    """Read JSON; raises ValueError if it is malformed, has NaN or infinity, or is nested too deep."""
    try:
        return json.loads(text, parse_constant=_refuse)
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
        more = f" and {len(repeated) - _MOST_NAMED} more" if len(repeated) > _MOST_NAMED else ""
        raise ValueError(", ".join(repeated[:_MOST_NAMED]) + more)
    return [entry for _, entry in found.values()]


def restore(kind: type[_Record], content: object, *, where: str = "", exact: bool = False) -> _Record:
    """Build a dataclass record from parsed JSON; raises ValueError that names the first wrong field, after `where`.

    Fields have simple types; those with a default may be missing unless `exact`.
    """
    hints, needed = _fields_of(cast("Hashable", kind))
    needed = set(hints) if exact else needed
    if not isinstance(content, Mapping) or not needed <= content.keys() <= hints.keys():
        of_what = f"of {where.removesuffix('.')} " if where else ""
        raise ValueError(f"its fields {of_what}should be {', '.join(hints)}")
    values = {name: _restored(hints[name], value, where=f"{where}{name}") for name, value in content.items()}
    return kind(**values)


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}")


@cache
def _fields_of(kind: Hashable) -> tuple[dict[str, Any], set[str]]:
    """Return the types of all fields, and the names of those without a default."""
    assert isinstance(kind, type)
    assert is_dataclass(kind)
    has_none = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    return get_type_hints(kind), set(has_none)


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
