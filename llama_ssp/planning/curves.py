"""Reading between measured points."""

import math
from collections.abc import Sequence


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Read a piecewise straight line; beyond its ends the nearest piece goes on, but never below the nearest end.

    Args:
        points: (x, y) with increasing x, at least one.
        x: where to read.
    """
    if len(points) == 1:
        return points[0][1]
    start = max((index for index, (known, _) in enumerate(points[:-1]) if known <= x), default=0)
    (x0, y0), (x1, y1) = points[start], points[start + 1]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(y, points[-1][1]) if x > points[-1][0] else y if x >= points[0][0] else max(y, 0.0)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Read a line over the logarithm of x, level beyond its ends."""
    logs = [(math.log(known), y) for known, y in points]
    return line(logs, min(max(math.log(x), logs[0][0]), logs[-1][0]))
