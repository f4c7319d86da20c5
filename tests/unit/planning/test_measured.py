"""What is read between measured points."""

import math

import pytest

from llama_ssp.config.hardware import CompositionPoint
from llama_ssp.planning.measured import composition_ratio


def _points(*figures: tuple[int, int, float]) -> list[CompositionPoint]:
    return [CompositionPoint(rows=rows, working_set_bytes=size, ratio=ratio) for size, rows, ratio in figures]


def test_parts_are_a_whole_where_nothing_else_was_measured() -> None:
    assert composition_ratio([], rows=3, working_set_bytes=2**20) == 1.0


@pytest.mark.parametrize(
    ("size", "rows", "ratio"),
    [
        (10**6, 1, 1.2), (10**8, 1, 2.0), (10**8, 16, 1.0), (10**7, 1, 1.6),  # half of the way in the logarithm
        (10**8, 4, 1.5), (10**7, 4, (1.2 + 1.5) / 2), (10**6, 4, 1.2),  # one set has a single point
    ],
)  # fmt: skip
def test_forwards_are_read_between_the_measured_ones_in_the_logarithms(size: int, rows: int, ratio: float) -> None:
    points = _points((10**8, 16, 1.0), (10**6, 1, 1.2), (10**8, 1, 2.0))
    assert composition_ratio(points, rows=rows, working_set_bytes=size) == pytest.approx(ratio)


def test_forwards_beyond_the_measured_ones_are_like_the_nearest() -> None:
    points = _points((10**6, 1, 1.2), (10**8, 1, 2.0), (10**8, 5, 1.8))
    assert composition_ratio(points, rows=1, working_set_bytes=10) == 1.2
    assert composition_ratio(points, rows=1, working_set_bytes=10**12) == 2.0
    assert math.isclose(composition_ratio(points, rows=512, working_set_bytes=10**12), 1.8)
