"""The measurements of `task=calibrate`: points, which the planner interpolates, in a profile per number of ranks.

Units: bytes and seconds. A file has the points as a table, a heading and a line for each point, which is one value for
YAML and for Hydra; they take a second to compose the thousand mappings of a calibrated machine.

    dtype rows elements working_set_bytes s
    fp32  1    4096     4194304           4.207e-06
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from llama_ssp.settings.schema import Dtype


@dataclass(frozen=True, kw_only=True)
class LinearPoint:
    """Measured time of one linear layer: `rows` inputs through a matrix of `elements` numbers.

    `dtype` is the number format of the matrix or its storage format, `arithmetic` that of inputs and sums.
    `working_set_bytes` is the size of all matrices that were cycled through, which decides if they stay in a cache.
    """

    dtype: str
    rows: int
    elements: int
    working_set_bytes: int
    s: float
    arithmetic: str = Dtype.fp32.name


@dataclass(frozen=True, kw_only=True)
class RowsPoint:
    """Measured time by the rows of a forward and the width of the model."""

    rows: int
    width: int
    s: float


@dataclass(frozen=True, kw_only=True)
class SizePoint:
    """Measured time by one size: bytes, rows, or numbers to draw from."""

    size: int
    s: float


RETIRED = frozenset({"composition", "composition_apart", "first_draft", "spread"})
"""Figures of profiles that earlier versions wrote; they are ignored."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of `task=calibrate` with `num_ranks` ranks of a node active at the same time."""

    num_ranks: int
    linear: list[LinearPoint]  # linear layers as the models call them.
    tied_head: list[LinearPoint]  # linear layers whose matrix is also an embedding.
    layer: list[RowsPoint]  # a decoder layer without its matrices and with few slots filled.
    frame: list[RowsPoint]  # a forward without layers and head.
    attention: list[SizePoint]  # seconds per further byte of keys and values, by the rows that read it.
    draw: list[SizePoint]  # a draw, by numbers processed (rows x vocabulary).
    verify: list[SizePoint]  # the rule, by numbers processed (rows x vocabulary).
    all_reduce: list[SizePoint] = field(default_factory=list)  # by bytes; empty for one rank.
    round_s: float = 0.0  # host time of the loop per round.
    forward_ratio: float = 1.0  # time of whole forwards over the sum of their parts.
    forward_ratio_apart: float = 1.0  # the same where each rank holds a model of its own.
    first_draft_s: float = 0.0  # how much longer the first draft forward of a round takes.

    def __hash__(self) -> int:
        """Equal profiles have equal hashes; the points are left out."""
        return hash((self.num_ranks, self.round_s, self.forward_ratio, len(self.linear)))


def text_of(points: Sequence[Mapping[str, Any]]) -> str:
    """Write points that have the same figures as a table."""
    lines = [[*points[0]], *([str(value) for value in point.values()] for point in points)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (" ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "".join(f"{line}\n" for line in padded)


def points_of(text: str) -> list[dict[str, Any]]:
    """Read a table; a point lacks figures that its line lacks, and one without a heading is named by its column."""
    heading, *lines = [line.split() for line in text.splitlines() if line.strip()] or [[]]
    return [
        {
            name or f"column {number}": _figure(value)
            for number, (name, value) in enumerate(zip_longest(heading, line), start=1)
            if value is not None
        }
        for line in lines
    ]


def _figure(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
