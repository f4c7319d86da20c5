"""The shape of a tree of drafted tokens as settings write it: how many children each node has, level by level.

`2x2x1` means that the newest token of the text has two children, each of them two, and each of those one. `1x1x1` is
a chain of three tokens. `sampling.trees` has the trees themselves.
"""

import re

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
    num_nodes, of_level = 0, 1
    for width in widths:
        of_level *= width
        num_nodes += of_level
    if num_nodes > MOST_NODES:
        given = num_nodes if num_nodes < 10**6 else "more than a million"
        raise ValueError(
            f"a tree of shape {shape} has {given} drafted tokens; {MOST_NODES} is the most: "
            "give fewer children, or fewer levels"
        )
    return widths
