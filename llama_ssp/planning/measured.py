"""Interpolates the measurements of a profile; `roofline` uses the results."""

import math
from collections.abc import Sequence

from llama_ssp.config.formats.format import NO_QUANTIZATION
from llama_ssp.config.machines.profile import CompositionPoint, LinearPoint, RowsPoint, SizePoint
from llama_ssp.config.schema import Dtype


def line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly between (x, y) points with increasing x.

    Beyond the ends the nearest segment is extrapolated: above, not below the last y; below, not below 0.
    """
    if len(points) == 1:
        return points[0][1]
    start = max((index for index, (known, _) in enumerate(points[:-1]) if known <= x), default=0)
    (x0, y0), (x1, y1) = points[start], points[start + 1]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return max(y, points[-1][1]) if x > points[-1][0] else y if x >= points[0][0] else max(y, 0.0)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate over the logarithm of x, constant beyond the ends."""
    logs = [(math.log(known), y) for known, y in points]
    return line(logs, min(max(math.log(x), logs[0][0]), logs[-1][0]))


def measured_linear_s(
    linear: list[LinearPoint],
    elements: int,
    *,
    rows: int,
    dtype: Dtype,
    working_set_bytes: int,
    arithmetic: Dtype = Dtype.fp32,
    slowdown: float = 1.0,
    quantization: str = NO_QUANTIZATION,
) -> float:
    """Interpolate measured linear layers by the size of the matrix, the rows and the working set.

    `LinearPoint` describes the arguments. A number format that was not measured uses the points of the first measured
    one. An arithmetic that was not measured takes `slowdown` times as long as fp32 on 16-bit weights. A `quantization`
    that was measured uses its own points; another one those of the number format.
    """
    own = [point for point in linear if point.dtype == quantization]
    linear = own or [point for point in linear if point.dtype in Dtype.__members__]
    points = [point for point in linear if point.arithmetic == arithmetic.name]
    if not points and arithmetic is not Dtype.fp32:
        return slowdown * measured_linear_s(
            linear, elements, rows=rows, dtype=Dtype.fp16, working_set_bytes=working_set_bytes
        )
    points = points or linear
    measured = {point.dtype for point in points}
    name = dtype.name if dtype.name in measured else points[0].dtype
    points = [point for point in points if point.dtype == name]
    sets = sorted({point.working_set_bytes for point in points})

    def at(set_bytes: int) -> float:
        chosen = [point for point in points if point.working_set_bytes == set_bytes]
        by_rows = {point.rows: _by_elements(chosen, point.rows, elements) for point in chosen}
        return line(sorted(by_rows.items()), rows)

    return between([(set_bytes, at(set_bytes)) for set_bytes in sets], working_set_bytes)


def _by_elements(points: list[LinearPoint], rows: int, elements: int) -> float:
    return line(sorted((point.elements, point.s) for point in points if point.rows == rows), elements)


def by_size(points: list[SizePoint], size: float) -> float:
    """Interpolate measured times by one size; 0 without any."""
    return line([(point.size, point.s) for point in points], size) if points else 0.0


def by_rows_and_width(points: list[RowsPoint], rows: int, width: int) -> float:
    """Interpolate measured operators by rows and width."""
    widths = sorted({point.width for point in points})
    return line(
        [(known, line(sorted((p.rows, p.s) for p in points if p.width == known), rows)) for known in widths], width
    )


def composition_ratio(points: list[CompositionPoint], *, rows: int, working_set_bytes: int) -> float:
    """Interpolate measured forwards over the logarithms of both, constant beyond the ends; 1 without points."""
    sets = sorted({point.working_set_bytes for point in points})

    def at(set_bytes: int) -> float:
        return between(sorted((p.rows, p.ratio) for p in points if p.working_set_bytes == set_bytes), rows)

    return between([(set_bytes, at(set_bytes)) for set_bytes in sets], working_set_bytes) if points else 1.0
