"""The shape of a tree of drafted tokens as settings write it.

`2x2x1` means that the newest token of the text has two children, each of them two, and these one each. `1x1x1` is
a chain of three tokens. The children of a node are drawn without replacement.
`dynamic-60x6x10` is the best 60 tokens of a tree that is 6 deep, in which the best 10 tokens of a level have 10
children each; `dynamic` means this one. `sampling.trees` has the trees themselves.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import mul

MOST_NODES = 256
"""The most drafted tokens of a tree."""
DYNAMIC = "dynamic"
_DEFAULT = "dynamic-60x6x10"  # as EAGLE-2's code


@dataclass(frozen=True)
class TreeShape:
    """The shape of a tree.

    Attributes:
        text: the shape as the settings write it; other texts may mean the same shape.
        num_nodes: number of drafted tokens.
        widths: the most children of a node, for each level from the root on.
        read: number of nodes that each forward of the draft after the first one reads.
        is_dynamic: whether the probabilities of the draft decide which nodes a round has.
    """

    text: str = field(compare=False)
    num_nodes: int
    widths: tuple[int, ...]
    read: tuple[int, ...]
    is_dynamic: bool = False

    @property
    def depth(self) -> int:
        """The most drafted tokens that a round accepts."""
        return len(self.widths)


@lru_cache(maxsize=256)
def tree_shape(text: str) -> TreeShape:
    """The shape that a text such as `2x2x1` or `dynamic-60x6x10` means.

    Raises:
        ValueError: it means none, or a tree with more than `MOST_NODES` drafted tokens or fewer than it needs.
    """
    whole = _DEFAULT if text == DYNAMIC else text
    is_dynamic, sizes = whole.startswith(f"{DYNAMIC}-"), whole.removeprefix(f"{DYNAMIC}-")
    is_list = re.fullmatch(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*", sizes)
    numbers = [int(number) for number in sizes.split("x")] if is_list else []
    if not numbers or (is_dynamic and len(numbers) != 3):
        raise ValueError(
            f"{text!r} is not the shape of a tree: give the number of children of a node on each level, "
            "at least 1, with x between them, such as 2x2x1x1; or "
            f"dynamic-NODESxDEPTHxCHILDREN, such as {_DEFAULT}"
        )
    if is_dynamic:
        num_nodes, depth, width = numbers
        shape = TreeShape(text, num_nodes, (width,) * depth, (width,) * (depth - 1), is_dynamic=True)
        least, most = max(depth, width * (depth - 1)), width + (depth - 1) * width**2
        if not least <= num_nodes <= max(most, least):
            raise ValueError(
                f"a tree of shape {text} has {num_nodes} drafted tokens: {depth} levels with {width} children need "
                f"{least} to {most}" + f", and {MOST_NODES} is the most" * (most > MOST_NODES)
            )
    else:
        levels = tuple(accumulate(numbers, mul))
        shape = TreeShape(text, sum(levels), tuple(numbers), levels[:-1])
    if shape.num_nodes > MOST_NODES:
        given = shape.num_nodes if shape.num_nodes < 10**6 else "more than a million"
        raise ValueError(
            f"a tree of shape {text} has {given} drafted tokens; {MOST_NODES} is the most: "
            "give fewer children, or fewer levels"
        )
    return shape
