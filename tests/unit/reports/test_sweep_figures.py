"""The charts of a sweep: every numeric setting is an axis, and every run is at its value, with its interval."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from llama_ssp.reports import plots
from llama_ssp.reports.charts import GREY, INK, Chart, Kind
from llama_ssp.reports.figures import MOST_PAIRS, prompts_of_run, sweep_charts
from llama_ssp.reports.measures import measure
from llama_ssp.reports.runs import Run
from llama_ssp.reports.settings import MARGIN, Setting, axes_of, axis_of, varying_settings
from tests.helpers.pictures import said
from tests.helpers.sweeps import simulated_run, simulated_sweep

pytestmark = pytest.mark.seconds


def charts_of(runs: list[Run]) -> dict[str, Chart]:
    return dict(sweep_charts(runs, [measure(run) for run in runs], varying_settings(runs)))


def setting(*values: object) -> Setting:
    return Setting(key="a.b", name="b", values=values)


def test_every_numeric_setting_is_the_axis_of_every_figure() -> None:
    charts = charts_of(simulated_sweep(random.Random(0)))
    assert list(charts) == [
        f"{figure}_by_{axis}" for axis in ("temperature", "K") for figure in ("speedup", "time", "acceptance")
    ]
    assert list(charts["speedup_by_K"].legend) == ["temperature=0", "temperature=1", "forecast"]
    assert list(charts["time_by_temperature"].legend) == ["plain", "K=2", "K=4"]


def test_every_run_is_a_dot_with_its_interval() -> None:
    runs = simulated_sweep(random.Random(0))
    chart = charts_of(runs)["speedup_by_K"]
    found = measure(runs[0]).speedup
    assert found
    low, high = found.low, found.high
    assert low
    assert high
    says = [mark.says for mark in chart.marks if mark.kind is Kind.dot]
    assert len(says) == 4
    assert says[0] == f"temperature=0, K=2: {found.value:.2f}x ({low:.2f}x to {high:.2f}x)"
    whiskers = [
        mark.points for mark in chart.marks if mark.kind is Kind.line and mark.points[0][0] == mark.points[1][0]
    ]
    assert [height for _, height in whiskers[0]] == [low, high]
    assert said(plots.picture(chart)) == says


@pytest.mark.parametrize("axis", ["K", "temperature"])
def test_no_interval_covers_another_one(axis: str) -> None:
    chart = charts_of(simulated_sweep(random.Random(0), ks=(2, 4, 6)))[f"time_by_{axis}"]
    places = [mark.points[0][0] for mark in chart.marks if mark.kind is Kind.dot]
    assert len(places) == 2 * 6, "plain and speculative, of every run"
    plain = {mark.points[0][0] for mark in chart.marks if mark.kind is Kind.dot and mark.colour == GREY}
    others = [mark.points[0][0] for mark in chart.marks if mark.kind is Kind.dot and mark.colour != GREY]
    assert len(others) == 6
    assert all(right - left > 0.01 for left, right in pairwise(sorted([*plain, *others])))


def test_the_forecast_of_a_run_crosses_its_interval() -> None:
    chart = charts_of(simulated_sweep(random.Random(0)))["speedup_by_K"]
    forecasts = [mark.points for mark in chart.marks if mark.kind is Kind.line and mark.colour == INK]
    middles = [(left + right) / 2 for (left, _), (right, _) in forecasts]
    dots = [mark.points[0][0] for mark in chart.marks if mark.kind is Kind.dot]
    assert middles == pytest.approx(dots)
    assert all(right - left < 0.04 for (left, _), (right, _) in forecasts)


def test_the_plain_line_of_a_line_has_its_shape() -> None:
    chart = charts_of(simulated_sweep(random.Random(0)))["time_by_K"]
    shapes = {mark.says.partition(", K=")[0]: mark.shape for mark in chart.marks if mark.kind is Kind.dot}
    assert shapes["plain, temperature=0"] == shapes["temperature=0"]
    assert shapes["plain, temperature=1"] == shapes["temperature=1"] != shapes["temperature=0"]


def test_runs_that_differ_in_their_seed_are_repeats_at_one_place() -> None:
    draw = random.Random(0)
    runs = []
    for seed in range(2):
        for k in (2, 4):
            run = simulated_run(draw, name=f"s/{seed}{k}", temperature=0.0, k=k, num_prompts=8)
            runs.append(replace(run, settings={**run.settings, "seed": seed}))
    charts = charts_of(runs)
    assert list(charts) == ["speedup_by_K", "time_by_K", "acceptance_by_K"]
    dots = [mark.points[0][0] for mark in charts["speedup_by_K"].marks if mark.kind is Kind.dot]
    assert sorted(dots) == sorted([MARGIN, 1 - MARGIN] * 2)
    assert [each.key for each in axes_of([setting_of_seed()], num_runs=2)] == ["seed"], "alone it is an axis"


def test_plain_times_of_other_models_are_lines_of_their_own() -> None:
    draw = random.Random(0)
    runs: list[Run] = []
    for model, slower in (("7B", 1.0), ("13B", 3.0)):
        for k in (2, 4):
            for draft in ("small", "tiny"):
                run = simulated_run(draw, name=f"s/{len(runs)}", temperature=0.0, k=k, num_prompts=8)
                lines = tuple(replace(line, ms=slower * line.ms) for line in run.lines)
                found = replace(run.summary, model=model, draft=draft)
                runs.append(replace(run, summary=found, lines=lines))
    chart = charts_of(runs)["time_by_K"]
    grey = [mark.points for mark in chart.marks if mark.kind is Kind.line and mark.colour == GREY]
    small, large = (points for points in grey if points[0][0] != points[1][0])
    assert max(height for _, height in small) < min(height for _, height in large)
    says = [mark.says for mark in chart.marks if mark.kind is Kind.dot and mark.colour == GREY]
    assert [each.partition(", K=")[0] for each in says] == ["plain, model=7B"] * 4 + ["plain, model=13B"] * 4
    assert next(iter(chart.legend)) == "plain"


def test_more_lines_than_colours_are_coloured_by_one_setting() -> None:
    draw = random.Random(0)
    runs = simulated_sweep(draw, num_prompts=2, temperatures=(0.0, 1.0), ks=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    both = [
        replace(run, settings={**run.settings, "sampling.top_k": top_k}, name=f"{run.name}{top_k}")
        for top_k in (20, 50)
        for run in runs
    ]
    chart = charts_of(both)["speedup_by_temperature"]
    assert list(chart.legend) == ["top k=20", "top k=50", "forecast"]
    says = {mark.says.partition(", temperature=")[0]: mark.colour for mark in chart.marks if mark.kind is Kind.dot}
    assert len(says) == 18
    assert len(set(says.values())) == 2
    assert says["K=9, top k=20"] != says["K=9, top k=50"]


def setting_of_seed() -> Setting:
    return Setting(key="seed", name="seed", values=(0, 1))


@pytest.mark.parametrize(
    ("values", "shares"),
    [
        ((2, 4, 8), [0, 1 / 3, 1]),
        ((1, 10, 100, 1000), [0, 1 / 3, 2 / 3, 1]),
        ((0, 1, 1000), [0, 1 / 2, 1]),
        ((8, 4, 8), [1, 0, 1]),
        ((4, "auto", 2), [1 / 2, 1, 0]),
        (("a", "b"), [0, 1]),
    ],
    ids=["by size", "crowded: by logarithm", "crowded, with zero: equal steps", "repeated", "not all numbers", "names"],
)
def test_values_stand_where_a_reader_expects_them(values: tuple[object, ...], shares: list[float]) -> None:
    axis = axis_of(setting(*values))
    assert axis.places == pytest.approx([MARGIN + (1 - 2 * MARGIN) * share for share in shares])
    assert all(left < right for left, right in pairwise(axis.names))


def test_without_numbers_the_setting_with_the_most_values_is_the_axis() -> None:
    few, many = setting("a", "b", "a"), replace(setting("x", "y", "z"), key="c")
    assert axes_of([few, many], num_runs=3) == [many]
    (numbers,) = axes_of([], num_runs=3)
    assert (numbers.name, numbers.values) == ("run", (0, 1, 2))


def test_the_prompts_of_a_run_are_shown_in_both_modes_but_not_thousands_of_them() -> None:
    run = simulated_run(random.Random(0), name="s", temperature=0.0, k=2, num_prompts=200)
    chart = prompts_of_run(measure(run))
    assert chart
    dots = [mark for mark in chart.marks if mark.kind is Kind.dot]
    assert 2 * MOST_PAIRS / 2 < len(dots) <= 2 * MOST_PAIRS
    assert all(0 <= x <= chart.highest_x and 0 <= y <= chart.highest_y for mark in dots for x, y in mark.points)
