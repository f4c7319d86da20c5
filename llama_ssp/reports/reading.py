"""JSON that a run has written, read back into records: every field must have its type, and every number a sane size.

A run folder can be damaged, edited or made by somebody else. What passes here can be summed, printed and drawn without
another check: no NaN, no number at the limit of its format, no list in place of a number, no nesting without end.
"""

import json
import math
import reprlib
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

MOST_BYTES = 64 << 20
"""A larger file is no summary."""
MOST, LEAST = 2.0**63, 1e-30
"""Sizes of numbers that a run can measure or be given: seeds, bytes and seconds are below, and nothing but 0 is nearer
to 0."""
MOST_DEPTH = 32
"""Nested lists and objects where a record says nothing of what they hold."""
_SIGNED = {"other_s", "other_share"}
"""What is left when parts are taken from a whole, a little below 0 where the parts were rounded up."""

_Record = TypeVar("_Record")


def read_json(text: str | bytes) -> object:
    """Read JSON.

    Raises:
        ValueError: it is no JSON, has NaN or infinity, or is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def restore(kind: type[_Record], content: object, *, where: str = "", exact: bool = False) -> _Record:
    """Build a record.

    Args:
        kind: a dataclass of fields with simple types; those with a default may be missing.
        content: what JSON held.
        where: what stands in front of a field's name in messages.
        exact: no field may be missing.

    Raises:
        ValueError: names the first field with another type or a number that cannot be.
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
    """The types of all fields, and the names of those without a default."""
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


def _is_shallow(value: object, most: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return not isinstance(value, list) or (most > 0 and all(_is_shallow(item, most - 1) for item in value))
