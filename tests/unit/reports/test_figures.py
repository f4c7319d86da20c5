"""The figures of a run and of a sweep show every measurement at its place, and are drawn whatever the records hold."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llama_ssp.reports import figures, plots
from llama_ssp.reports.folder import Run
from llama_ssp.reports.measures import measure
from llama_ssp.reports.records import RankActivity
from llama_ssp.reports.settings import Setting, axes_of, axis_of, varying_settings
from llama_ssp.reports.summary import summarise
from tests.helpers.runs import FACTS, FAST, PLAIN, run
from tests.helpers.sweeps import simulated_run, simulated_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

pytestmark = pytest.mark.seconds


def points(figure: "Figure | None", label: str) -> list[tuple[float, float]]:
    """The points of a line."""
    assert figure
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == label)
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def bars(figure: "Figure | None") -> list[tuple[float, float, str]]:
    """Width and height of all bars, and the name in the legend."""
    assert figure
    return [
        (patch.get_width(), patch.get_height(), str(group.get_label()))
        for group in figure.axes[0].containers
        for patch in group.patches  # type: ignore[attr-defined]
    ]


def figures_of(runs: list[Run]) -> "dict[str, Figure]":
    return dict(figures.sweep_figures(runs, [measure(run) for run in runs], varying_settings(runs)))


def setting(*values: object) -> Setting:
    return Setting(key="a.b", name="b", values=values)


@pytest.mark.parametrize("name", ["$a_{b$", "_x", "模型 🦙", "m" * 500, "a\nb", "", "</text><script>"])
def test_any_name_can_be_drawn(name: str) -> None:
    figure = figures.acceptance_by_position([run(PLAIN, FAST)], [name])
    assert figure
    assert "<script>" not in plots.picture(figure)
    assert points(figure, name or "_child0")[0] == (1, 2 / 3)


def test_every_line_has_its_own_look_also_without_colours() -> None:
    looks = [plots.look(number) for number in range(plots.MOST_LINES)]
    assert len({(each["color"], each["marker"]) for each in looks}) == plots.MOST_LINES
    assert all(left["marker"] != right["marker"] for left, right in pairwise(looks))
    runs = [run(PLAIN, FAST)] * (plots.MOST_LINES + 1)
    assert figures.acceptance_by_position(runs, [str(number) for number in range(len(runs))]) is None


def test_the_rate_at_a_position_counts_the_rounds_that_examined_it() -> None:
    line = replace(FAST, num_rounds=4, accepted_lengths=[2, 0, 1, 2], examined_lengths=[2, 1, 2, 0])
    assert points(figures.acceptance_by_position([run(line)], ["r"]), "r") == [(1, 2 / 3), (2, 1 / 2)]


def test_the_parts_of_a_round_follow_each_other_and_add_up() -> None:
    found = bars(figures.round_timeline(run(PLAIN, FAST)))
    assert [width for width, *_ in found] == pytest.approx([2.0, 2.0, 6.0, 1.0])
    assert [name for *_, name in found][1:] == [
        "draft: 2 x 2.000 ms",
        "verification and rule: 6.000 ms",
        "other: 1.000 ms",
    ]


def test_the_timeline_shows_work_and_waiting_of_both_models() -> None:
    line = replace(
        FAST, num_rounds=5, accepted_lengths=[1, 4, 2, 0, 1], examined_lengths=[1, 4, 3, 1, 1],
        draft_s=0.005, verify_s=0.04, other_s=0.005,
    )  # fmt: skip
    placement = {"target": {"ranks": [0]}, "draft": {"ranks": [1]}, "num_replicas": 1}
    waited = [RankActivity(rank=rank, rounds_s=10.0, waited_s=waited_s) for rank, waited_s in ((0, 1.5), (1, 5.0))]
    summary = summarise(replace(FACTS, placement=placement), [line], num_draft_tokens=4, activities=waited)
    found = bars(figures.round_timeline(replace(run(FAST), summary=summary)))
    assert [width for width, *_ in found] == pytest.approx([1.25] * 4 + [5.0, 8.5, 1.5])


def test_forecasts_and_memory_stand_next_to_measurements() -> None:
    forecast = figures.forecast_against_measured([run(PLAIN, FAST)])
    assert points(forecast, "plain") == [(10.0, 9.0)]
    assert points(forecast, "speculative") == [(4.0, 4.5)]
    memory = bars(figures.memory_by_rank([run(PLAIN, FAST)]))
    assert [(height, name) for _, height, name in memory] == [(3.0, "planned")] * 2 + [(2.0, "measured")] * 2
    assert len(bars(figures.memory_by_rank([run(PLAIN, FAST)] * 3))) == 2 * 3, "the fullest rank of each run"


def test_chosen_draft_lengths_are_averaged_along_the_text() -> None:
    assert figures.draft_lengths(run(PLAIN, FAST)) is None
    drawn = figures.draft_lengths(run(replace(FAST, draft_lengths=[2, 1, 2])))
    assert points(drawn, "drafted") == [(1.5, 2.0), (4.5, 1.0), (5.5, 2.0)]
    assert points(drawn, "accepted") == [(1.5, 2.0), (4.5, 0.0), (5.5, 1.0)]


def test_the_prompts_of_a_run_are_shown_in_both_modes_but_not_thousands_of_them() -> None:
    measured = measure(simulated_run(random.Random(0), name="s", temperature=0.0, k=2, num_prompts=200))
    plain, fast = (points(figures.prompts_of_run(measured), mode) for mode in ("plain", "speculative"))
    assert figures.MOST_PAIRS / 2 < len(plain) == len(fast) <= figures.MOST_PAIRS
    assert plain == sorted(plain)


def test_every_numeric_setting_is_the_axis_of_every_figure() -> None:
    drawn = figures_of(simulated_sweep(random.Random(0)))
    assert list(drawn) == [
        f"{figure}_by_{axis}" for axis in ("temperature", "K") for figure in ("speedup", "time", "acceptance")
    ]
    names = {line.get_label() for line in drawn["time_by_temperature"].axes[0].lines}
    assert {"plain", "K=2", "K=4"} < names


def test_every_run_is_a_dot_with_its_interval_and_its_forecast() -> None:
    runs = simulated_sweep(random.Random(0))
    drawn = figures_of(runs)["speedup_by_K"]
    estimates = [measure(each).speedup for each in runs]
    dots = [np.asarray(line.get_xydata())[0] for line in drawn.axes[0].lines if line.get_linestyle() == "None"]
    heights = {float(y) for _, y in dots if not np.isnan(y)}
    assert {each.value for each in estimates if each} <= heights
    paths = [path for each in drawn.axes[0].collections for path in each.get_paths()]
    whiskers = [[height for _, height in np.asarray(path.vertices).tolist()] for path in paths]
    assert sorted(whiskers) == sorted([each.low, each.high] for each in estimates if each)
    assert [level for _, level in points(drawn, "forecast")] == [2.0] * 4
    places = sorted(x for x, _ in points(drawn, "forecast"))
    assert all(right - left > 0.01 for left, right in pairwise(places)), "no interval covers another"


def test_runs_that_differ_in_their_seed_are_repeats_at_one_place() -> None:
    runs = [
        replace(run, settings={**run.settings, "seed": seed})
        for seed in range(2)
        for run in simulated_sweep(random.Random(seed), num_prompts=8, temperatures=(0.0,))
    ]
    drawn = figures_of(runs)
    assert list(drawn) == ["speedup_by_K", "time_by_K", "acceptance_by_K"]
    assert sorted(x for x, _ in points(drawn["speedup_by_K"], "forecast")) == [0, 0, 1, 1]
    seeds = Setting(key="seed", name="seed", values=(0, 1))
    assert axes_of([seeds], num_runs=2) == [seeds], "alone it is an axis"


def test_more_lines_than_looks_are_coloured_by_one_setting() -> None:
    runs = simulated_sweep(random.Random(0), num_prompts=2, ks=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    both = [
        replace(run, settings={**run.settings, "sampling.top_k": top_k}, name=f"{run.name}{top_k}")
        for top_k in (20, 50)
        for run in runs
    ]
    lines = figures_of(both)["speedup_by_temperature"].axes[0].lines
    assert {name for line in lines if "=" in (name := str(line.get_label()))} == {"top k=20", "top k=50"}


@pytest.mark.parametrize(("last", "is_joined"), [(4, True), ("auto", False)])
def test_a_line_joins_numbers_alone(last: object, is_joined: bool) -> None:
    first, second = simulated_sweep(random.Random(0), temperatures=(0.0,))
    second = replace(second, settings={**second.settings, "speculation.num_draft_tokens": last})
    lines = figures_of([first, second])["acceptance_by_K"].axes[0].lines
    joined = [line for line in lines if len(np.asarray(line.get_xydata())) == 2 and line.get_linestyle() != "None"]
    assert len(joined) == is_joined


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
    assert axis.places == pytest.approx(shares)


def test_without_numbers_the_setting_with_the_most_values_is_the_axis() -> None:
    few, many = setting("a", "b", "a"), replace(setting("x", "y", "z"), key="c")
    assert axes_of([few, many], num_runs=3) == [many]
    (numbers,) = axes_of([], num_runs=3)
    assert (numbers.name, numbers.values) == ("run", (0, 1, 2))
