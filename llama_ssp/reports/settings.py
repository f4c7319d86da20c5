"""Reads the settings of a run folder, and compares them with those of a run that resumes it, key by key.

The folder may be damaged or made by somebody else: YAML that could expand without end is refused, and messages
truncate what they quote.
"""

import json
from collections.abc import Collection

import yaml

MOST_CHARS = 1 << 20
"""Longest `config.yaml`."""
MOST_DEPTH = 32
"""Deepest nesting, far above that of any config."""
_MOST_SHOWN, _MOST_SHOWN_CHARS = 10, 200
"""Most changed settings that are named, and most characters shown of each value."""


def changed_settings(old_yaml: str, new_yaml: str, *, changeable: Collection[str]) -> list[str]:
    """Describe each changed setting in a clause; raises ValueError if the old text cannot be read.

    A list that the old text lacks was empty. Keys in `changeable`, and all below them, may differ.
    """
    old, new = flat(read_settings(old_yaml)), flat(yaml.safe_load(new_yaml))
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
    """Read a `config.yaml`; raises ValueError for invalid YAML, and if it is too large, too deep or has aliases."""
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
        raise ValueError("it is not YAML") from error  # odd tags and numbers raise these other errors in the library


def _shown(value: object) -> str:
    return _cut(json.dumps(value, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Map the dotted key of every leaf of nested mappings to its value; a list is a leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _is_below(key: str, parents: Collection[str]) -> bool:
    return any(key == parent or key.startswith(parent + ".") for parent in parents)
