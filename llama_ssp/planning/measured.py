"""Interpolates the measurements of a profile; `roofline` uses the results."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from llama_ssp.config.formats import NO_QUANTIZATION
from llama_ssp.config.machines.profile import LinearPoint, Profile, RowsPoint, SizePoint
from llama_ssp.config.schema import Dtype

_X = itemgetter(0)
_Surface: TypeAlias = list[tuple[int, list[tuple[int, list[tuple[float, float]]]]]]
"""(elements, seconds) by rows, by the working set, all in increasing order."""


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between (x, y) points with increasing x.

    Beyond the ends the nearest segment is extrapolated: above, not below the last y; below, not below 0.
    """
    if len(points) == 1:
        return points[0][1]
    start = max(bisect_right(points, x, hi=len(points) - 1, key=_X) - 1, 0)
    (x0, y0), (x1, y1) = points[start], points[start + 1]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(y, points[-1][1]) if x > points[-1][0] else y if x >= points[0][0] else max(y, 0.0)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate over the logarithm of x, constant beyond the ends."""
    logs = [(math.log(known), y) for known, y in points]
    return line(logs, min(max(math.log(x), logs[0][0]), logs[-1][0]))


class LinearTable:
    """Measured linear layers, interpolated by the size of the matrix, the rows and the working set."""

    def __init__(self, points: Iterable[LinearPoint]) -> None:
        self._points = list(points)
        self._surfaces: dict[tuple[str, Dtype, Dtype], tuple[_Surface, bool]] = {}

    def has_arithmetic(self, arithmetic: Dtype) -> bool:
        """Whether layers of this arithmetic were measured."""
        return any(point.arithmetic == arithmetic.name for point in self._points)

    def seconds(
        self,
        elements: int,
        *,
        rows: int,
        dtype: Dtype,
        working_set_bytes: int,
        arithmetic: Dtype = Dtype.fp32,
        slowdown: float = 1.0,
        quantization: str = NO_QUANTIZATION,
    ) -> float:
        """The time of one layer; `LinearPoint` describes the arguments.

        A number format that was not measured uses the points of the first measured one. An arithmetic that was not
        measured takes `slowdown` times as long as fp32 on 16-bit weights. A `quantization` that was measured uses its
        own points; another one those of the number format.
        """
        kind = quantization, arithmetic, dtype
        if kind not in self._surfaces:
            self._surfaces[kind] = self._surface_of(*kind)
        surface, is_measured = self._surfaces[kind]
        by_set = [
            (set_bytes, line([(known, line(points, elements)) for known, points in by_rows], rows))
            for set_bytes, by_rows in surface
        ]
        return (1.0 if is_measured else slowdown) * between(by_set, working_set_bytes)

    def _surface_of(self, quantization: str, arithmetic: Dtype, dtype: Dtype) -> tuple[_Surface, bool]:
        """The points to interpolate, and whether they are of this arithmetic; fp32 is the one that every table has."""
        own = [point for point in self._points if point.dtype == quantization]
        stored = own or [point for point in self._points if point.dtype in Dtype.__members__]
        found = [point for point in stored if point.arithmetic == arithmetic.name]
        if found or arithmetic is Dtype.fp32:
            return _surface(found or stored, dtype), True
        return self._surface_of(quantization, Dtype.fp32, Dtype.fp16)[0], False


class LinearTables(NamedTuple):
    """Those of a profile: all linear layers, and those whose matrix is also an embedding."""

    linear: LinearTable
    tied_head: LinearTable


@lru_cache(maxsize=32)
def tables_of(profile: Profile) -> LinearTables:
    """The linear layers of a profile, sorted once for all plans."""
    return LinearTables(LinearTable(profile.linear), LinearTable(profile.tied_head))


def _surface(points: Sequence[LinearPoint], dtype: Dtype) -> _Surface:
    """The points of a number format, or of the first one that was measured."""
    measured = {point.dtype for point in points}
    name = dtype.name if dtype.name in measured else points[0].dtype
    by_set: dict[int, dict[int, list[tuple[float, float]]]] = {}
    for point in points:
        if point.dtype == name:
            by_rows = by_set.setdefault(point.working_set_bytes, {})
            by_rows.setdefault(point.rows, []).append((point.elements, point.s))
    return [
        (set_bytes, [(rows, sorted(found)) for rows, found in sorted(by_rows.items())])
        for set_bytes, by_rows in sorted(by_set.items())
    ]


def by_size(points: list[SizePoint], size: float) -> float:
    """Interpolate measured times by one size; 0 without any."""
    return line([(point.size, point.s) for point in points], size) if points else 0.0


def by_rows_and_width(points: list[RowsPoint], rows: int, width: int) -> float:
    """Interpolate measured operators by rows and width."""
    widths = sorted({point.width for point in points})
    return line(
        [(known, line(sorted((p.rows, p.s) for p in points if p.width == known), rows)) for known in widths], width
    )
