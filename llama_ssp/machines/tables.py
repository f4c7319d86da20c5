"""Measured points as text: a heading, and a line for each point.

    dtype rows elements working_set_bytes s
    fp32  1    4096     4194304           4.207e-06

A calibrated machine has a thousand points. As a table they are one value for YAML and for Hydra, which take a second to
compose a thousand mappings.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any


def text_of(points: Sequence[Mapping[str, Any]]) -> str:
    """Write points that have the same figures, in columns."""
    lines = [[*points[0]], *([str(value) for value in point.values()] for point in points)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (" ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "".join(f"{line}\n" for line in padded)


def points_of(text: str) -> list[dict[str, Any]]:
    """Read them again; a point lacks figures that its line lacks, and one without a heading is named by its column."""
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
