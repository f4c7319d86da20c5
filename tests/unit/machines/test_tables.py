"""Points as tables of text, and a machine that is described with them."""

from dataclasses import asdict
from typing import Any

import pytest

from llama_ssp.machines import hardware
from llama_ssp.machines.profile import LinearPoint, Profile, points_of, text_of

POINTS: list[dict[str, Any]] = [{"dtype": "fp32", "rows": 1, "s": 4.207e-06}, {"dtype": "int8", "rows": 512, "s": 0.5}]


def test_points_are_read_as_they_were_written_in_columns() -> None:
    assert text_of(POINTS) == "dtype rows s\nfp32  1    4.207e-06\nint8  512  0.5\n"
    read = points_of(text_of(POINTS))
    assert read == POINTS
    assert [[type(value) for value in point.values()] for point in read] == [[str, int, float]] * 2


def _figures(**points: object) -> dict[str, Any]:
    empty = Profile(num_ranks=1, linear=[], tied_head=[], layer=[], frame=[], attention=[], draw=[], verify=[])
    return asdict(hardware.load("laptop_cpu")) | {"profiles": [asdict(empty) | points]}


def test_points_of_a_machine_may_be_lists_or_tables() -> None:
    points = [LinearPoint(dtype="fp32", rows=rows, elements=64, working_set_bytes=8, s=1e-6 * rows) for rows in (1, 5)]
    listed = [asdict(point) for point in points]
    of_lists, of_tables = (_figures(linear=linear) for linear in (listed, text_of(listed)))
    assert hardware.problems_of(of_tables) == []
    assert hardware.build(of_tables) == hardware.build(of_lists)
    assert hardware.build(of_tables).profiles[0].linear == points


def test_a_figure_without_a_heading_is_named_by_its_place() -> None:
    (found,) = hardware.problems_of(_figures(layer="rows width s\n1 8 1.5 9\n"))
    assert found.startswith("unknown figure of hardware.profiles[0].layer[0] 'column 4': there are")


@pytest.mark.parametrize("table", ["", "a word", "rows width s\n"])
def test_a_text_without_points_is_no_table(table: str) -> None:
    (found,) = hardware.problems_of(_figures(layer=table))
    assert found == (f"hardware.profiles[0].layer must be a list, or a table with a heading and lines, not {table!r}")
