"""What is read between measured points."""

from functools import partial

import pytest

from llama_ssp.machines.profile import LinearPoint
from llama_ssp.planning.timing import LinearTable, between, line
from llama_ssp.settings.schema import Dtype


def test_a_number_format_that_was_not_measured_takes_the_points_of_one_that_was() -> None:
    def points(dtype: str, s: float) -> list[LinearPoint]:
        return [LinearPoint(dtype=dtype, rows=1, elements=n, working_set_bytes=8, s=s * n) for n in (1000, 2000)]

    linear = points("fp32", 2.0) + points("fp16", 1.0)
    price = partial(LinearTable(linear).seconds, 1500, rows=1, working_set_bytes=8)
    assert [price(dtype=dtype) for dtype in (Dtype.bf16, Dtype.fp32, Dtype.fp16)] == [3000.0, 3000.0, 1500.0]


def test_arithmetic_that_was_not_measured_takes_so_many_times_fp32_on_16_bit_weights() -> None:
    def point(dtype: Dtype, arithmetic: Dtype, s: float) -> LinearPoint:
        return LinearPoint(dtype=dtype.name, arithmetic=arithmetic.name, rows=1, elements=9, working_set_bytes=8, s=s)

    linear = [point(Dtype.fp32, Dtype.fp32, 4.0), point(Dtype.fp16, Dtype.fp32, 2.0)]

    def price(points: list[LinearPoint], *, dtype: Dtype, arithmetic: Dtype = Dtype.fp32) -> float:
        table = LinearTable(points)
        return table.seconds(9, rows=1, dtype=dtype, working_set_bytes=8, arithmetic=arithmetic, slowdown=3.0)

    assert price(linear, dtype=Dtype.fp16) == 2.0
    assert [price(linear, dtype=dtype, arithmetic=dtype) for dtype in (Dtype.bf16, Dtype.fp16)] == [6.0, 6.0]
    measured = [*linear, point(Dtype.bf16, Dtype.bf16, 7.0), point(Dtype.fp16, Dtype.fp16, 9.0)]
    assert [price(measured, dtype=dtype, arithmetic=dtype) for dtype in (Dtype.bf16, Dtype.fp16)] == [7.0, 9.0]
    assert [price(measured, dtype=dtype) for dtype in (Dtype.fp32, Dtype.fp16)] == [4.0, 2.0]


LINE = [(1.0, 10.0), (5.0, 30.0), (9.0, 70.0)]


@pytest.mark.parametrize(("x", "y"), [(1, 10), (3, 20), (5, 30), (7, 50), (9, 70), (10, 80)])
def test_a_line_goes_through_its_points_and_on_behind_the_last(x: float, y: float) -> None:
    assert line(LINE, x) == pytest.approx(y)


def test_a_line_never_falls_behind_its_last_point_nor_below_zero() -> None:
    assert line([(1.0, 10.0), (2.0, 4.0)], 5.0) == 4.0
    assert line([(10.0, 1.0), (20.0, 11.0)], 1.0) == 0.0


def test_one_point_is_the_same_everywhere() -> None:
    assert line([(4.0, 7.0)], 100.0) == 7.0


def test_between_reads_on_a_logarithmic_axis_and_is_level_outside() -> None:
    assert between([(1.0, 0.0), (100.0, 2.0)], 10.0) == pytest.approx(1.0)
    assert between([(1.0, 0.0), (100.0, 2.0)], 1e6) == pytest.approx(2.0)
    assert between([(1.0, 0.5), (100.0, 2.0)], 0.1) == pytest.approx(0.5)
