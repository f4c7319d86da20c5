"""Reads JSON and YAML of a run folder back, checking every field's type, every number's size and all nesting.

A run folder may be damaged, edited or foreign. Values that pass can be summed, printed and drawn without
further checks: no NaN or infinity, no list in place of a number, no endless nesting. Messages truncate their quotes.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from llama_ssp.architectures.model_files import is_deep
from llama_ssp.settings.schema import RunConfig
from llama_ssp.types import Parsed

MOST_BYTES = 64 << 20
"""Largest `summary.json`."""
MOST_CHARS = 1 << 20
"""Longest `config.yaml`."""
_MOST, _LEAST = 2.0**63, 1e-30
"""Bounds of numbers in a record, larger than any seed, size or time; 0 is allowed."""
_MOST_DEPTH = 32
"""Deepest nesting of a config, and where a record does not specify types."""
_SIGNED = {"other_s", "other_share", "value", "low", "high", "logprob"}
"""Logarithms, evaluations' numbers, and differences of a whole and its parts, below 0 if these were rounded up."""

_Record = TypeVar("_Record")


def read_json(text: str | bytes) -> object:
    """Read JSON; raises ValueError if it is malformed, has NaN or infinity, or is nested too deep."""

    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def restore(kind: type[_Record], content: object, *, where: str = "") -> _Record:
    """Build a dataclass record from parsed JSON; raises ValueError that names the first wrong field, after `where`.

    Fields have simple types; fields with a default may be missing.
    """
    hints, needed = _fields_of(cast("Any", kind))
    if not isinstance(content, Mapping) or not needed <= content.keys() <= hints.keys():
        of_what = f"of {where.removesuffix('.')} " if where else ""
        raise ValueError(f"its fields {of_what}should be {', '.join(hints)}")
    return kind(**{name: _restored(hints[name], value, where=f"{where}{name}") for name, value in content.items()})


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:  # noqa: ANN401 - a dataclass
    """Return the types of all fields, and the names of fields without a default."""
    needed = {field.name for field in fields(kind) if field.default is field.default_factory is MISSING}
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}, needed


def _restored(expected: Any, value: object, *, where: str) -> object:  # noqa: ANN401 - a type as annotations have it
    origin, parts = get_origin(expected), get_args(expected)
    if origin is UnionType:
        return None if value is None else _restored(parts[0], value, where=where)
    if origin is list and isinstance(value, list):
        return [_restored(parts[0], item, where=f"{where}[{place}]") for place, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: _restored(parts[1], item, where=f"{where}.{name[:40]}") for name, item in value.items()}
    if isinstance(expected, type) and is_dataclass(expected):
        return restore(expected, value, where=f"{where}.")
    if not _fits(expected, value, signed=where.rpartition(".")[2].partition("[")[0] in _SIGNED):
        raise ValueError(f"{where} holds {reprlib.repr(value)}")
    return value


def _fits(expected: object, value: Parsed, *, signed: bool) -> bool:
    if expected is Any:
        return not is_deep(value, _MOST_DEPTH)
    if expected is float and type(value) in (int, float):
        return value == 0 or (_LEAST < abs(value) < _MOST and (signed or value > 0))  # false for NaN and infinity
    if expected is int and type(value) is int:
        return 0 <= value < _MOST
    return type(value) is expected


def is_storable(value: object) -> bool:
    """Whether a record can hold a value of any type, parsed from JSON, and be read back."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:  # 1e999 is infinity to Python's parser
        return False
    return not is_deep(value, _MOST_DEPTH - 1)


class _Dumper(yaml.SafeDumper):
    """Writes members of enums by their command-line names, and repeats equal objects in full instead of by aliases."""

    def ignore_aliases(self, _value: object) -> bool:
        """Write no aliases, since `read_settings` refuses them."""
        return True


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_str(member.name))


_NO_SETTINGS = ("stored_format", "modules", "place", "bad_ids", "eos_ids")


def to_yaml(config: RunConfig) -> str:
    """Write all settings of a run as YAML, without what its sweep and the files of its models say."""
    settings = asdict(
        config, dict_factory=lambda entries: {name: value for name, value in entries if name not in _NO_SETTINGS}
    )
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
            if depth > _MOST_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it is nested too deep, or has aliases")
        return _flat(yaml.safe_load(text))
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError("it is not YAML") from error  # odd tags and numbers raise these other errors in the library


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
