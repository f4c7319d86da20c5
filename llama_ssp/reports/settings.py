"""The settings of a run folder compared with those of a run that resumes it, key by key.

What is read here may be damaged or made by somebody else: YAML that would unfold without end is refused, and what a
message quotes is cut off.
"""

import json
from collections.abc import Collection

import yaml

MOST_CHARS = 1 << 20
"""A longer text is no `config.yaml`."""
MOST_DEPTH = 32
"""Nested settings of a run stay far below."""
_MOST_SHOWN, _MOST_SHOWN_CHARS = 10, 200
"""Changed settings that are named, and characters that are shown of each value."""


def changed_settings(old_yaml: str, new_yaml: str, *, changeable: Collection[str]) -> list[str]:
    """Say which settings differ, a clause each.

    Args:
        old_yaml: of the folder; a setting that is newer than the folder has been off in it.
        new_yaml: of this run.
        changeable: dotted keys that may differ, with all below them.

    Raises:
        ValueError: the old text cannot be read.
    """
    old, new = _flat(read_settings(old_yaml)), _flat(yaml.safe_load(new_yaml))
    old = {key: value for key, value in new.items() if value == []} | old
    changed = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_below(key, changeable)
    ]
    named = changed[:_MOST_SHOWN]
    clauses = [f"{_cut(key)} was {_shown(old.get(key))} and is now {_shown(new.get(key))}" for key in named]
    return clauses + ([f"{len(changed) - len(named)} more"] if len(changed) > len(named) else [])


def read_settings(text: str) -> object:
    """Read the YAML of a `config.yaml`.

    Raises:
        ValueError: it is no YAML, too large or nested too deep, or has aliases, which can unfold without end.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"it has {len(text)} characters")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError("it is nested too deep, or has aliases")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError("it is no YAML") from error  # the library lets other errors of odd tags and numbers through


def _shown(value: object) -> str:
    return _cut(json.dumps(value, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Name every leaf of nested mappings by its dotted key; a list is a leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _is_below(key: str, parents: Collection[str]) -> bool:
    return any(key == parent or key.startswith(parent + ".") for parent in parents)
