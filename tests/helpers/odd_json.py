"""Odd JSON: documents of which a few parts have been replaced, taken away, repeated or added."""

import json
import random
from collections.abc import Sequence
from typing import Any

RAW = {
    "@digits": "9" * 5000,
    "@nines": "9" * 400,
    "@deep": "[" * 5000 + "]" * 5000,
    "@objects": '{"a":' * 3000 + "1" + "}" * 3000,
    "@nan": "NaN",
    "@inf": "-Infinity",
    "@1e400": "1e400",
    "@1e-400": "1e-400",
    "@half": '"\\ud800"',
    "@long": '"' + "x" * 100_000 + '"',
    "@list": "[" + "0," * 20_000 + "0]",
    "@nested": "[" * 500 + "]" * 500,
}
"""JSON that `json.dumps` does not write, by the text that stands in for it."""
ODD: list[Any] = [
    *RAW,
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    64,
    200,
    1024,
    1025,
    1 << 31,
    1 << 32,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    0.0,
    -0.0,
    0.5,
    -1.5,
    64.0,
    1e308,
    -1e308,
    5e-324,
    1e-31,
    2.0**62,
    "",
    "0",
    "-4",
    "x",
    "\0",
    "\x1b[2J",
    "\u202e",
    "</script>",
    "é" * 50,
    "a/b",
    "../x",
    "none",
    "silu",
    "llama",
    "float16",
    "int8",
    "t3",
    "<s>",
    "{{ x }}",
    "{% for %}",
    "a" * 300,
    [],
    [0],
    [1, 2],
    [[]],
    [None],
    ["x"],
    [1.5],
    [[[0]]],
    [1] * 5000,
    {},
    {"a": 1},
    {"x": None},
    {"a": {"b": []}},
    {"": None},
    {"plain": 0.0},
    "speculative",
    "plain",
]


def places(tree: Any) -> list[tuple[Any, ...]]:
    """The paths of all parts of a document, itself included."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [(), *((key, *below) for key, value in items for below in places(value))]


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another part at this path; `...` takes the part away."""
    if not path:
        return value
    tree = tree.copy()
    if value is ... and len(path) == 1:
        del tree[path[0]]
    else:
        tree[path[0]] = put(tree[path[0]], path[1:], value)
    return tree


def mutated(
    chance: random.Random,
    document: dict[str, Any],
    *,
    values: Sequence[Any] = ODD,
    keys: Sequence[str] = ("x", "", "\x1b", "y" * 9999),
) -> Any:
    """The document with one or two changes: with `values` in some places, or under new `keys`."""
    tree: Any = document
    for _ in range(chance.randint(1, 2)):
        found = places(tree)
        path, value = chance.choice(found[1:] or found), chance.choice(values)
        what = chance.random()
        tree = put(tree, path, ... if path and what < 0.1 else [value] * 50 if what < 0.15 else value)
        if isinstance(tree, dict) and chance.random() < 0.3:
            tree |= {chance.choice(keys): chance.choice(values)}
    return tree


def to_text(tree: Any, *, ascii_only: bool = True) -> str:
    """Write a document, with what its marks stand for."""
    text = json.dumps(tree, ensure_ascii=ascii_only)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text
