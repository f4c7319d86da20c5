"""Changes of JSON documents for fuzzing: other types, depths and sizes, and numbers at their limits, at drawn places.

A document of `json` cannot hold what is too deep to be written, so a mark stands for it until the text is made.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

_DEEP = {"@deep lists@": ("[", "]", 100_000), "@deep objects@": ('{"a":', "}", 5_000), "@some depth@": ("[", "]", 70)}
NUMBERS = (
    0, -1, 1, 2, 3, 7, 8, 64, 199, 200, 201, 255, 2**15, 2**16 + 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, -0.5, 1.5, 64.0, 1e-40, 1e-320, 1e30, 1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", "0", "-4", "8", "x", "é", "\0", "\ud800", "\u202e", "a/b", "../x", "none", "auto", "silu", "gelu", "llama",
    "float16", "bfloat16", "int8", "t3", "<s>", "{{ x }}", "{% for %}", "a" * 300, "b" * 100_000, *_DEEP,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [0],
    [[]],
    [None],
    ["x"],
    [1.5],
    {"a": 1},
    {"x": None},
    {"": {}},
    [[[0]]],
    [1] * 5000,
)
ODD = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(OTHERS))
PLAUSIBLE = st.one_of(
    st.integers(0, 20), st.sampled_from((16, 32, 64, 128, 160, 200, 256)), st.floats(0, 2), st.booleans()
)
"""Values that pass for another model's, and so get further than odd ones."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one document.

    Attributes:
        turns: which item is taken at each level; the walk ends where there is none, or with the turns.
        act: what is done with the item found: replaced by `value`, added under `key`, or one of four other changes.
        key: the name of a field that is added, or that replaces the item's own.
        value: what a field is given.
    """

    turns: tuple[int, ...]
    act: str
    key: str
    value: Any

    def apply(self, document: Any) -> Any:  # noqa: ANN401 - any JSON value
        """Return the changed document; the one given may be changed too."""
        if self.act == "add" and isinstance(document, dict):
            return document | {self.key: deepcopy(self.value)}
        place, parent, item = None, None, document
        for turn in self.turns:
            places = list(item) if isinstance(item, dict) else list(range(len(item))) if isinstance(item, list) else []
            if not places:
                break
            parent, place = item, places[turn % len(places)]
            item = item[place]
        if parent is None:
            return deepcopy(self.value)
        self._change(parent, place)
        return document

    def _change(self, parent: Any, place: Any) -> None:  # noqa: ANN401 - a list or an object, and a place in it
        match self.act:
            case "remove":
                del parent[place]
            case "rename" if isinstance(parent, dict):
                parent[self.key] = parent.pop(place)
            case "wrap":
                parent[place] = [parent[place]]
            case "repeat" if isinstance(parent, list):
                parent.extend(deepcopy(parent[place]) for _ in range(50))
            case _:
                parent[place] = deepcopy(self.value)


def mutations(keys: tuple[str, ...]) -> st.SearchStrategy[Mutation]:
    """One change.

    Args:
        keys: names that added and renamed fields may get.
    """
    return st.builds(
        Mutation,
        turns=st.lists(st.integers(0, 60), min_size=1, max_size=5).map(tuple),
        act=st.sampled_from(["replace"] * 5 + ["add"] * 5 + ["remove", "rename", "wrap", "repeat"]),
        key=st.sampled_from(keys),
        value=ODD | PLAUSIBLE | PLAUSIBLE,
    )


def to_text(document: Any) -> str:  # noqa: ANN401 - any JSON value
    """Write a document, with what its marks stand for."""
    text = json.dumps(document)
    for mark, (opening, closing, depth) in _DEEP.items():
        text = text.replace(f'"{mark}"', opening * depth + "0" + closing * depth)
    return text
