"""The figure of a report shows every measurement at its place, whole, and is drawn whatever the records hold."""

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llama_ssp.reports import figures
from llama_ssp.reports.figures import MOST_BARS, Bar, bars_of
from llama_ssp.reports.measures import Estimate, measure
from tests.helpers.runs import CELL, FAST, PLAIN, run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

pytestmark = pytest.mark.seconds

time_per_token = figures.styled()(figures.time_per_token)


def drawn(*rows: Bar) -> "Axes":
    figure = time_per_token(rows)
    assert figure
    return figure.axes[0]


def points(axes: "Axes", label: str) -> list[tuple[float, float]]:
    """The points of a mode, or of forecasts, with the row of each."""
    lines = [np.asarray(line.get_xydata()) for line in axes.lines if line.get_label() == label]
    return [(float(found[0, 0]), round(float(found[0, 1]))) for found in lines]


def row(name: str = "n", value: float = 2.0, forecast: float | None = None) -> Bar:
    return Bar(name, {"plain": Estimate(value, value - 0.5, value + 1.5)}, {"plain": forecast})


def test_a_run_is_a_row_with_both_modes_and_their_forecasts() -> None:
    found = run(PLAIN, FAST)
    axes = drawn(*bars_of(found, measure(found.lines), "mine"))
    assert points(axes, "plain") == [(10.0, 0)]
    assert points(axes, "speculative") == [(4.0, 0)]
    assert points(axes, "forecast") == [(9.0, 0), (4.5, 0)]
    alone = run(PLAIN)
    assert points(drawn(*bars_of(alone, measure(alone.lines), "mine")), "forecast") == [(9.0, 0)], "of modes that ran"


def test_a_benchmark_has_a_row_for_each_cell_with_all_candidates() -> None:
    cells = [CELL, replace(CELL, prompt_tokens=512, ms_per_token={"plain": 3.0, "generate": 7.0})]
    found = run(PLAIN)
    found = replace(found, summary=replace(found.summary, cells=cells), lines=())
    axes = drawn(*bars_of(found, measure(()), "mine"))
    assert points(axes, "plain") == [(2.0, 0), (3.0, 1)]
    assert (points(axes, "generate"), points(axes, "forecast")) == ([(7.0, 1)], [(600.5, 0), (600.5, 1)])
    assert [label.get_text() for label in axes.get_yticklabels()] == [cell.name for cell in cells]


@pytest.mark.parametrize("forecast", [None, 90.0])
def test_no_dot_and_no_interval_is_cut(forecast: float | None) -> None:
    axes = drawn(row(value=8.0, forecast=forecast), row(value=3.0))
    low, high = axes.get_xlim()
    assert (low, high > (forecast or 9.5)) == (0, True)
    bottom, top = axes.get_ylim()
    assert (top, bottom) == (-0.5, 1.5), "the first run stands at the top"


def test_many_runs_are_drawn_up_to_a_limit_and_nothing_without_a_measurement() -> None:
    axes = drawn(*(row(value=1.0 + place) for place in range(MOST_BARS + 5)))
    assert len(points(axes, "plain")) == MOST_BARS
    assert axes.get_title(loc="left") == f"Time per token, the first {MOST_BARS} of {MOST_BARS + 5}"
    assert time_per_token([Bar("n", {}, {"plain": 3.0})]) is None


@pytest.mark.parametrize("name", ["$a_{b$", "_x", "模型 🦙", "m" * 500, "a\nb", "", "</text><script>"])
def test_any_name_can_be_drawn(name: str) -> None:
    figure = time_per_token([row(name), row()])
    assert figure
    assert "<script>" not in figures.picture(figure)


def test_every_line_has_its_own_look_also_without_colours() -> None:
    looks = [figures.look(number) for number in range(12)]
    assert len({(look["color"], look["marker"]) for look in looks}) == 12
    assert all(first["marker"] != second["marker"] for first, second in pairwise(looks))
