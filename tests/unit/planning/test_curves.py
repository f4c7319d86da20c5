"""Reading between measured points."""

import pytest

from llama_ssp.planning.curves import between, line

POINTS = [(1.0, 10.0), (5.0, 30.0), (9.0, 70.0)]


@pytest.mark.parametrize(("x", "y"), [(1, 10), (3, 20), (5, 30), (7, 50), (9, 70), (10, 80)])
def test_a_line_goes_through_its_points_and_on_behind_the_last(x: float, y: float) -> None:
    assert line(POINTS, x) == pytest.approx(y)


def test_a_line_never_falls_behind_its_last_point_nor_below_zero() -> None:
    assert line([(1.0, 10.0), (2.0, 4.0)], 5.0) == 4.0
    assert line([(10.0, 1.0), (20.0, 11.0)], 1.0) == 0.0


def test_one_point_is_the_same_everywhere() -> None:
    assert line([(4.0, 7.0)], 100.0) == 7.0


def test_between_reads_on_a_logarithmic_axis_and_is_level_outside() -> None:
    assert between([(1.0, 0.0), (100.0, 2.0)], 10.0) == pytest.approx(1.0)
    assert between([(1.0, 0.0), (100.0, 2.0)], 1e6) == pytest.approx(2.0)
    assert between([(1.0, 0.5), (100.0, 2.0)], 0.1) == pytest.approx(0.5)
