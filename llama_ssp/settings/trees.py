"""The shape of a tree of drafted tokens as settings write it: how many children each node has, level by level.

`2x2x1` means that the newest token of the text has two children, each of them two, and each of those one. `1x1x1` is
a chain of three tokens. `sampling.trees` has the trees themselves.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

MOST_NODES = 256
"""The most drafted tokens of a tree."""


def tree_widths(shape: str) -> tuple[int, ...]:
    """The number of children of a node on each level, from the root on.

    Raises:
        ValueError: the text is no list of numbers from 1 on, or the tree has more than `MOST_NODES` drafted tokens.
    """
    if not re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*", shape):
        raise ValueError(
            f"{shape!r} is not the shape of a tree: give the number of children of a node on each level, "
            "at least 1, with x between them, such as 2x2x1x1"
        )
    widths = tuple(int(width) for width in shape.split("x"))
    if (number := num_nodes(widths)) > MOST_NODES:
        given = number if number < 10**6 else "more than a million"
        raise ValueError(
            f"a tree of shape {shape} has {given} drafted tokens; {MOST_NODES} is the most: "
            "give fewer children, or fewer levels"
        )
    return widths


def num_nodes(widths: Sequence[int]) -> int:
    """The number of drafted tokens of a tree."""
    return sum(accumulate(widths, mul))
