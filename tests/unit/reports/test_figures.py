"""The charts of a run and of a sweep show every measurement at its place, and are drawn whatever the records hold."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from llama_ssp.reports import figures, plots
from llama_ssp.reports.charts import COLOURS, GREY, INK, MOST_LINES, Chart, Kind, Point
from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import measure
from llama_ssp.reports.records import RankActivity
from llama_ssp.reports.settings import MARGIN, Setting, axes_of, axis_of, varying_settings
from llama_ssp.reports.summary import summarise
from tests.helpers.pictures import said
from tests.helpers.runs import FACTS, FAST, PLAIN, run
from tests.helpers.sweeps import simulated_run, simulated_sweep

pytestmark = pytest.mark.seconds


def drawn(chart: Chart | None) -> str:
    assert chart is not None
    return plots.picture(chart)


def dots(chart: Chart) -> list[Point]:
    return [mark.points[0] for mark in chart.marks if mark.kind is Kind.dot]


def charts_of(runs: list[Run]) -> dict[str, Chart]:
    return dict(figures.sweep_charts(runs, [measure(run) for run in runs], varying_settings(runs)))


def setting(*values: object) -> Setting:
    return Setting(key="a.b", name="b", values=values)


def one_bar(height: float) -> Chart:
    chart = Chart(title="t", x_label="x", y_label="y", highest_x=1, highest_y=height)
    chart.bar(0.2, 0.8, height, COLOURS[0], says=f"{height}", name="bar")
    chart.line([(0, height), (1, height)], COLOURS[1])
    return chart


@pytest.mark.parametrize("highest", [1e-9, 0.03, 0.99, 1.0, 1.82, 7, 24.9, 330, 1e12])
def test_ticks_are_few_and_a_bar_of_the_highest_value_fills_the_axes(highest: float) -> None:
    picture = plots.picture(one_bar(highest))
    heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", picture.split("<title>")[1].split("/>")[0])]
    assert 0.85 < (max(heights) - min(heights)) / (plots.HEIGHT - plots.TOP - plots.BOTTOM) <= 1
    ticks = re.findall(r"text-anchor: end[^>]*>([^<]*)<", picture)
    assert 3 <= len(ticks) <= 12
    assert len(set(ticks)) == len(ticks)


@pytest.mark.parametrize("highest", [0.0, float("nan"), float("inf"), -1.0, 5e-324, 1.7e308])
def test_an_axis_of_nothing_or_of_nonsense_is_drawn_all_the_same(highest: float) -> None:
    assert ">1.0<" in plots.picture(one_bar(highest))


@pytest.mark.parametrize("name", ["$a_{b$", "_x", "\x00\x1b[2J\ud800", "模型 🦙", "m" * 500, "a\nb", ""])
def test_any_name_can_be_drawn(name: str) -> None:
    picture = drawn(figures.acceptance_by_position([run(PLAIN, FAST)], [name]))
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert "position 1: 66.7 % of 3" in said(picture)[0]


def test_every_line_has_its_own_look_also_without_colours() -> None:
    runs = [run(PLAIN, FAST)] * (MOST_LINES + 1)
    names = [str(number) for number in range(len(runs))]
    chart = figures.acceptance_by_position(runs[1:], names[1:])
    assert chart is not None
    looks = [(mark.colour, mark.shape) for mark in chart.legend.values()]
    assert len(looks) == len(set(looks)) == MOST_LINES
    assert all(left[1] != right[1] for left, right in pairwise(looks))
    assert {(mark.colour, mark.shape) for mark in chart.marks if mark.kind is Kind.dot} == set(looks)
    assert figures.acceptance_by_position(runs, names) is None


def test_the_rate_at_a_position_counts_the_rounds_that_examined_it() -> None:
    line = replace(FAST, num_rounds=4, accepted_lengths=[2, 0, 1, 2], examined_lengths=[2, 1, 2, 0])
    chart = figures.acceptance_by_position([run(line)], ["r"])
    assert chart
    assert dots(chart) == [(1, 2 / 3), (2, 1 / 2)]


def test_the_parts_of_a_round_follow_each_other_and_add_up() -> None:
    chart = figures.round_timeline(run(PLAIN, FAST))
    assert chart is not None
    assert said(drawn(chart)) == [
        "draft step 1: 2.000 ms", "draft step 2: 2.000 ms", "verification and rule: 6.000 ms", "other: 1.000 ms",
    ]  # fmt: skip
    assert "one row's share" in chart.title, "a batch shares its rounds out"
    ends = [(left, right) for (left, _), (right, _) in (mark.points for mark in chart.marks)]
    assert all(begin > end for (_, end), (begin, _) in pairwise(ends))


def test_the_timeline_shows_work_and_waiting_of_both_models() -> None:
    line = replace(
        FAST, num_rounds=5, accepted_lengths=[1, 4, 2, 0, 1], examined_lengths=[1, 4, 3, 1, 1],
        draft_s=0.005, verify_s=0.04, other_s=0.005,
    )  # fmt: skip
    placement = {"target": {"ranks": [0]}, "draft": {"ranks": [1]}, "num_replicas": 1}
    waited = [RankActivity(rank=rank, rounds_s=10.0, waited_s=waited_s) for rank, waited_s in ((0, 1.5), (1, 5.0))]
    summary = summarise(replace(FACTS, placement=placement), [line], num_draft_tokens=4, activities=waited)
    assert said(drawn(figures.round_timeline(replace(run(FAST), summary=summary)))) == [
        "target: 8.500 ms", "target idle: 1.500 ms", *[f"draft, step {step}: 1.250 ms" for step in (1, 2, 3, 4)],
        "draft idle: 5.000 ms",
    ]  # fmt: skip


def test_forecasts_and_memory_stand_next_to_measurements() -> None:
    forecasts = said(drawn(figures.forecast_against_measured([run(PLAIN, FAST)], ["s/0"])))
    assert forecasts == ["s/0, plain: 9.00 forecast, 10.00 measured", "s/0, speculative: 4.50 forecast, 4.00 measured"]
    bars = said(drawn(figures.memory_by_rank([run(PLAIN, FAST)])))
    assert bars == [f"rank {rank}: {size}" for rank in (0, 1) for size in ("3.00 GiB planned", "2.00 GiB measured")]
    assert len(said(drawn(figures.memory_by_rank([run(PLAIN, FAST), run(PLAIN, FAST)])))) == 4


def test_the_prompts_of_a_run_are_shown_in_both_modes_but_not_thousands_of_them() -> None:
    chart = figures.prompts_of_run(
        measure(simulated_run(random.Random(0), name="s", temperature=0.0, k=2, num_prompts=200))
    )
    assert chart
    assert figures.MOST_PAIRS < len(dots(chart)) <= 2 * figures.MOST_PAIRS
    assert all(0 <= x <= chart.highest_x and 0 <= y <= chart.highest_y for x, y in dots(chart))


def test_every_numeric_setting_is_the_axis_of_every_figure() -> None:
    charts = charts_of(simulated_sweep(random.Random(0)))
    assert list(charts) == [
        f"{figure}_by_{axis}" for axis in ("temperature", "K") for figure in ("speedup", "time", "acceptance")
    ]
    assert list(charts["speedup_by_K"].legend) == ["temperature=0", "temperature=1", "forecast"]
    assert list(charts["time_by_temperature"].legend) == ["plain", "K=2", "K=4"]


def test_every_run_is_a_dot_with_its_interval_apart_from_others_and_its_forecast_across_it() -> None:
    runs = simulated_sweep(random.Random(0))
    chart = charts_of(runs)["speedup_by_K"]
    found = measure(runs[0]).speedup
    assert found
    says = [mark.says for mark in chart.marks if mark.kind is Kind.dot]
    assert says[0] == f"temperature=0, K=2: {found.value:.2f}x ({found.low:.2f}x to {found.high:.2f}x)"
    assert said(plots.picture(chart)) == says
    places = [x for x, _ in dots(chart)]
    assert all(right - left > 0.01 for left, right in pairwise(sorted(places)))
    lines = [mark for mark in chart.marks if mark.kind is Kind.line]
    whiskers = [mark.points for mark in lines if mark.points[0][0] == mark.points[1][0]]
    assert [height for _, height in whiskers[0]] == [found.low, found.high]
    forecasts = [mark.points for mark in lines if mark.colour == INK]
    assert [(left + right) / 2 for (left, _), (right, _) in forecasts] == pytest.approx(places)


def test_runs_that_differ_in_their_seed_are_repeats_at_one_place() -> None:
    runs = [
        replace(run, settings={**run.settings, "seed": seed})
        for seed in range(2)
        for run in simulated_sweep(random.Random(seed), num_prompts=8, temperatures=(0.0,))
    ]
    charts = charts_of(runs)
    assert list(charts) == ["speedup_by_K", "time_by_K", "acceptance_by_K"]
    assert sorted(x for x, _ in dots(charts["speedup_by_K"])) == sorted([MARGIN, 1 - MARGIN] * 2)
    seeds = Setting(key="seed", name="seed", values=(0, 1))
    assert axes_of([seeds], num_runs=2) == [seeds], "alone it is an axis"


def test_plain_times_of_other_models_are_lines_of_their_own() -> None:
    draw = random.Random(0)
    runs: list[Run] = []
    for model, slower in (("7B", 1.0), ("13B", 3.0)):
        for k in (2, 4):
            for draft in ("small", "tiny"):
                run = simulated_run(draw, name=f"s/{len(runs)}", temperature=0.0, k=k, num_prompts=8)
                lines = tuple(replace(line, ms=slower * line.ms) for line in run.lines)
                runs.append(replace(run, summary=replace(run.summary, model=model, draft=draft), lines=lines))
    chart = charts_of(runs)["time_by_K"]
    grey = [mark.points for mark in chart.marks if mark.kind is Kind.line and mark.colour == GREY]
    small, large = (points for points in grey if points[0][0] != points[1][0])
    assert max(height for _, height in small) < min(height for _, height in large)
    says = [mark.says for mark in chart.marks if mark.kind is Kind.dot and mark.colour == GREY]
    assert [each.partition(", K=")[0] for each in says] == ["plain, model=7B"] * 4 + ["plain, model=13B"] * 4
    assert next(iter(chart.legend)) == "plain"


def test_more_lines_than_looks_are_coloured_by_one_setting() -> None:
    runs = simulated_sweep(random.Random(0), num_prompts=2, ks=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    both = [
        replace(run, settings={**run.settings, "sampling.top_k": top_k}, name=f"{run.name}{top_k}")
        for top_k in (20, 50)
        for run in runs
    ]
    chart = charts_of(both)["speedup_by_temperature"]
    assert list(chart.legend) == ["top k=20", "top k=50", "forecast"]
    says = {mark.says.partition(", temperature=")[0]: mark.colour for mark in chart.marks if mark.kind is Kind.dot}
    assert len(says) == 18
    assert says["K=9, top k=20"] != says["K=9, top k=50"]


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
