"""The page of reports, its tables and its figure, and `runs.csv`."""

import csv
import io
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import pytest

from llama_ssp.extensions.reports import figures
from llama_ssp.extensions.reports.figures import MOST_BARS, Bar, bars_of
from llama_ssp.extensions.reports.html import report
from llama_ssp.extensions.reports.tables import percentiles_table, runs_to_csv
from llama_ssp.reports.measures import Estimate
from llama_ssp.reports.records import CompletionLine, Evaluation, Excerpt, Measure, Span, Summary
from llama_ssp.reports.runs import Run
from llama_ssp.reports.tables import runs_table
from tests.helpers.lanes import heavy
from tests.helpers.runs import CELL, FAST, PLAIN, run
from tests.helpers.sweeps import PLAIN_MS, simulated_sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

pytestmark = pytest.mark.seconds


def sweep(ks: Sequence[int]) -> list[Run]:
    """A run for each K."""
    runs = [run(PLAIN, FAST, name=f"s/{k}", num_draft_tokens=k) for k in ks]
    return [replace(one, settings={"speculation.num_draft_tokens": k}) for one, k in zip(runs, ks, strict=True)]


def read_csv(runs: Sequence[Run]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(runs_to_csv(runs))))


def page_of(*lines: CompletionLine, **measured: object) -> str:
    """The page of a run with another summary, which can be read back."""
    found = run(*lines)
    summary = replace(found.summary, **measured)  # type: ignore[arg-type]
    assert Summary.from_json(json.dumps(asdict(summary))) == summary
    return report([replace(found, summary=summary)])


def test_the_report_of_a_run_has_its_figure_and_every_number() -> None:
    page = page_of(PLAIN, FAST)
    assert page.count("<figure>") == page.count("<svg ") == 1
    assert ">Time per token</text>" in page
    assert "<b>2.50x</b><span>speed-up" in page
    assert "<b>60 %</b>" in page
    assert "2 ranks, 1 prompt, 20 new tokens" in page
    assert "A round: draft 36 %, verification and rule 55 %, other 9 %." in page
    assert re.search(r"Memory in GiB: rank 0 2.00 \(planned 3.00\)\s+, rank 1 2.00 \(planned 3.00\).", page)
    assert "plain, ms/token</th>" in page
    alone = page_of(PLAIN)
    for title in ("A round:", "speculative", "<pre", "suite=", "accepted</th>"):
        assert title not in alone.partition("<body>")[2].replace("plain over speculative", "")


def test_the_page_has_a_dark_mode_and_the_figure_its_colours() -> None:
    page = page_of(PLAIN, FAST)
    assert "prefers-color-scheme: dark" in page
    drawn = page.partition("<svg")[2].partition("</svg>")[0]
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == {"ink", "soft", "line", "paper"}
    assert figures.INK not in drawn


def test_the_report_of_a_sweep_has_a_row_and_a_section_for_every_run() -> None:
    page = report(sweep((2, 3)), missing=["s/4 has no summary"])
    assert page.count("<details>") == 2
    before_sections = page.partition("<details>")[0]
    assert before_sections.count("<tr>") == (1 + 2) + (1 + 2 * 2), "runs, and modes of runs"
    assert "s/4 has no summary" in page
    assert "The runs differ in K (2, 3)." in page
    assert page.count('<th class="left">K</th>') == 2
    assert "<summary>s/3: K=3</summary>" in page
    assert page.count("<figure>") == 3
    assert ">2: K=3</text>" in before_sections
    assert "The settings of all runs are the same." in report([run(PLAIN, FAST), run(PLAIN, FAST, name="s/1")])


def test_a_disturbed_run_is_marked_in_every_table_and_figure() -> None:
    runs = sweep((2, 3))
    runs[1] = replace(runs[1], summary=replace(runs[1].summary, disturbed="others <ran>", point="point 2 of 2: K=3"))
    page = report(runs)
    for table in runs_table(runs), percentiles_table(runs):
        assert [row[0].text for row in table.rows if row[1].text == "3"] == ["2 †"] * (len(table.rows) // 2)
        assert "†" not in table.rows[0][0].text
    assert ">2 †: K=3</text>" in page
    assert "† disturbed</b>: others &lt;ran&gt;" in page
    assert "<p>point 2 of 2: K=3</p>" in page
    assert ">† disturbed</text>" in report(runs[1:]), "the figure of the run alone"
    assert [row["disturbed"] for row in read_csv(runs)] == ["", "others <ran>"]


def test_medians_have_intervals_and_percentiles_stand_in_their_order() -> None:
    page = page_of(*[replace(kind, index=index, ms=kind.ms + index) for index in range(8) for kind in (PLAIN, FAST)])
    assert re.search(r">10.35<small>10.\d\d to 10.\d\d</small></td>", page)
    assert ">8 of 8</td>" in page, "faster on"
    assert re.search(r">plain</td><td[^>]*>8</td><td[^>]*>10.35</td><td[^>]*>10.63</td><td[^>]*>10.69</td>", page)


def test_completions_are_shown_with_their_drafted_tokens() -> None:
    spans = [Span(text="a<b", drafted=True), Span(text=" \x1b[2J", drafted=False)]
    shown = Excerpt(index=0, sample=0, mode="speculative", prompt="<p>", spans=spans)
    page = page_of(PLAIN, FAST, excerpts=[shown])
    assert '<span class="prompt">&lt;p&gt;</span><span class="drafted">a&lt;b</span><span class="own"> \\x1b[2J' in page
    found = replace(run(PLAIN, FAST), summary=replace(run(PLAIN, FAST).summary, excerpts=[shown]))
    assert report([found, run(PLAIN, FAST, name="s/1")]).count("<pre") == 1


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_is_shown_with_its_figures(passed: bool) -> None:
    measures = [Measure(name="difference", value=-0.25, low=-0.5, high=0.0), Measure(name="<b>", value=4)]
    page = page_of(PLAIN, evaluation=Evaluation(suite="s", passed=passed, reason="1 < 2", measures=measures))
    assert f"<b>suite=s {'passed' if passed else 'failed'}</b>: 1 &lt; 2" in page
    assert re.search(r"difference</td><td[^>]*>-0.25</td><td[^>]*>-0.5 to 0</td>", page)
    assert re.search("&lt;b&gt;</td><td[^>]*>4</td><td[^>]*></td>", page)


def test_the_page_needs_no_other_file_and_runs_nothing() -> None:
    page = report([run(PLAIN, FAST), run(PLAIN, FAST, name="s/1")])
    assert re.findall(r"<(script|link rel=.stylesheet|img|iframe|object)|@import|url\((?!#)", page) == []
    elsewhere = [where for where in re.findall(r'(?:src|href)="([^"]*)"', page) if not where.startswith("#")]
    assert set(elsewhere) == {"data:,"}


def test_the_same_runs_give_the_same_page_whatever_settings_a_user_has_for_matplotlib() -> None:
    page = page_of(PLAIN, FAST)
    with mpl.rc_context({"font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        assert page_of(PLAIN, FAST) == page


class Elements(HTMLParser):
    """Every element of a page with the names of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


@pytest.mark.parametrize("is_one", [True, heavy(False)])
def test_names_from_records_cannot_become_markup(is_one: bool) -> None:
    def page(text: str) -> str:
        named = replace(run(PLAIN, FAST, model=text, name=text), status=text)
        cells = [replace(CELL, name=text)]
        found = replace(named.summary, task=text, git_commit=text, draft=text, cells=cells, versions={text: text})
        named = replace(named, summary=found)
        return report([named] if is_one else [named, run(PLAIN, FAST, name=text)], missing=[text])

    evil = "\"'><script>alert(1)</script>&{{ runs }}</title></style><b onload='x'>"
    assert Elements(page(evil)).found == Elements(page("a harmless name of the same length or so, in one column")).found
    assert "&lt;script&gt;" in page(evil)


def test_runs_csv_has_a_row_for_each_run_with_its_settings_and_intervals() -> None:
    rows = read_csv(simulated_sweep(random.Random(0)))
    assert [(row["run"], row["sampling.temperature"], row["speculation.num_draft_tokens"]) for row in rows] == [
        ("sweep/0", "0.0", "2"),
        ("sweep/1", "0.0", "4"),
        ("sweep/2", "1.0", "2"),
        ("sweep/3", "1.0", "4"),
    ]
    for row in rows:
        for name in ("plain_ms_per_token", "speculative_ms_per_token", "speedup", "acceptance"):
            assert float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"])
        assert float(row["plain_ms_per_token"]) == pytest.approx(PLAIN_MS, rel=0.3)
        assert 2 * float(row["plain_ms_per_token_p50"]) == pytest.approx(float(row["plain_first_token_ms_p50"]))
        assert (row["num_paired"], row["forecast_speedup"]) == ("15", "2.0")


def test_a_run_of_one_mode_has_empty_columns_for_the_other() -> None:
    [row] = read_csv([run(PLAIN)])
    names = ("plain_ms_per_token", "speculative_ms_per_token", "speedup", "acceptance")
    assert [row[name] for name in names] == ["10.0", "", "", ""]


def test_tables_have_a_cell_for_every_column() -> None:
    runs = [*simulated_sweep(random.Random(0)), run(PLAIN)]
    tables = [runs_table(runs), percentiles_table(runs)]
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert len(tables[0].rows) == 5
    assert len(tables[1].rows) == 9


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
    axes = drawn(*bars_of(run(PLAIN, FAST), "mine"))
    assert points(axes, "plain") == [(10.0, 0)]
    assert points(axes, "speculative") == [(4.0, 0)]
    assert points(axes, "forecast") == [(9.0, 0), (4.5, 0)]
    assert points(drawn(*bars_of(run(PLAIN), "mine")), "forecast") == [(9.0, 0)], "of modes that ran"


def test_a_task_with_results_has_a_row_for_each_with_all_candidates() -> None:
    cells = [CELL, replace(CELL, name="prompt 512", ms_per_token={"plain": 3.0, "generate": 7.0})]
    found = run(PLAIN)
    found = replace(found, summary=replace(found.summary, cells=cells), lines=())
    axes = drawn(*bars_of(found, "mine"))
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
