"""The report shows what was measured, alone in one file, whatever stands in the records."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from llama_ssp.reports import figures, plots
from llama_ssp.reports.charts import COLOURS, MOST_LINES, Chart, Kind
from llama_ssp.reports.html import report
from llama_ssp.reports.records import CompletionLine, Evaluation, Excerpt, Measure, Span, Summary
from llama_ssp.reports.runs import Run
from tests.helpers.lanes import heavy
from tests.helpers.pictures import said
from tests.helpers.runs import CELL, FAST, PLAIN, summary

pytestmark = pytest.mark.seconds


def run(*lines: CompletionLine, name: str = "s/0", model: str = "big", num_draft_tokens: int = 2) -> Run:
    draft = "small" if any(line.mode == "speculative" for line in lines) else None
    found = summary(*lines, model=model, draft=draft, num_draft_tokens=num_draft_tokens)
    return Run(name=name, status="done", summary=found, lines=lines)


def sweep(ks: Sequence[int]) -> list[Run]:
    """A run for each K."""
    runs = [run(PLAIN, FAST, name=f"s/{k}", num_draft_tokens=k) for k in ks]
    return [replace(each, settings={"speculation.num_draft_tokens": k}) for each, k in zip(runs, ks, strict=True)]


def picture(chart: Chart | None) -> str:
    assert chart is not None
    return plots.picture(chart)


def corners(chart: Chart, kind: Kind) -> list[Sequence[tuple[float, float]]]:
    return [mark.points for mark in chart.marks if mark.kind is kind]


def test_the_report_of_a_run_has_every_figure_and_number() -> None:
    page = report([run(PLAIN, FAST)])
    for title in ("A round of spec", "Acceptance by pos", "Forecast against", "prompt by prompt", "Memory, planned"):
        assert title in page
    assert "<b>2.50x</b><span>speed-up" in page
    assert "<b>60 %</b>" in page


def test_the_report_of_a_sweep_has_a_row_and_a_section_for_every_run() -> None:
    page = report(sweep((2, 3)), missing=["s/4 has no summary"])
    assert page.count("<details>") == 2
    before_sections = page.partition("<details>")[0]
    assert before_sections.count("<tr>") == (1 + 2) + (1 + 2 * 2), "runs, and modes of runs"
    assert "s/4 has no summary" in page


def test_a_setting_that_varies_is_a_column_a_label_and_an_axis() -> None:
    page = report(sweep((2, 3)))
    assert "The runs differ in K (2, 3)." in page
    assert page.count('<th class="left">K</th>') == 2
    assert "<summary>s/3: K=3</summary>" in page
    for title in ("Speed-up by K", "Time per token by K", "Acceptance by K"):
        assert f"<figcaption>{title}</figcaption>" in page
    assert "The settings of all runs are the same." in report([run(PLAIN, FAST), run(PLAIN, FAST, name="s/1")])


def test_medians_have_intervals_and_percentiles_stand_in_their_order() -> None:
    lines = [replace(kind, index=index, ms=kind.ms + index) for index in range(8) for kind in (PLAIN, FAST)]
    page = report([run(*lines)])
    assert re.search(r">ms/token, plain</td><td[^>]*>10.35</td><td[^>]*>10.\d\d to 10.\d\d</td><td[^>]*>8</td>", page)
    assert "faster on 8 of 8" in page
    assert re.search(r">plain</td><td[^>]*>8</td><td[^>]*>10.35</td><td[^>]*>10.63</td><td[^>]*>10.69</td><td", page)


def test_completions_are_shown_with_their_drafted_tokens() -> None:
    spans = [Span(text="a<b", drafted=True), Span(text=" \x1b[2J", drafted=False)]
    shown = Excerpt(index=0, sample=0, mode="speculative", prompt="<p>", spans=spans)
    told = replace(run(PLAIN, FAST), summary=replace(run(PLAIN, FAST).summary, excerpts=[shown]))
    page = report([told])
    assert '<span class="prompt">&lt;p&gt;</span><span class="drafted">a&lt;b</span><span class="own"> \\x1b[2J' in page
    assert Summary.from_json(json.dumps(asdict(told.summary))) == told.summary
    assert "<pre" not in report([run(PLAIN, FAST)])
    assert report([told, run(PLAIN, FAST, name="s/1")]).count("<pre") == 2, "in the sweep and in the section of its run"


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_is_shown_with_its_figures_and_can_be_read_back(passed: bool) -> None:
    measures = [Measure(name="difference", value=-0.25, low=-0.5, high=0.0), Measure(name="<b>", value=4)]
    evaluation = Evaluation(suite="s", passed=passed, reason="1 < 2", measures=measures)
    judged = replace(run(PLAIN, FAST).summary, evaluation=evaluation)
    page = report([replace(run(PLAIN, FAST), summary=judged)])
    assert f"<b>suite=s {'passed' if passed else 'failed'}</b>: 1 &lt; 2" in page
    assert re.search(r"difference</td><td[^>]*>-0.25</td><td[^>]*>-0.5 to 0</td>", page)
    assert re.search("&lt;b&gt;</td><td[^>]*>4</td><td[^>]*></td>", page)
    assert Summary.from_json(json.dumps(asdict(judged))) == judged
    assert "suite=s" not in report([run(PLAIN, FAST)])


def test_nothing_is_drawn_that_was_not_measured() -> None:
    page = report([run(PLAIN)])
    assert "Memory, planned" in page
    for title in ("A round of spec", "Acceptance by position", "prompt by prompt"):
        assert title not in page


def test_the_page_needs_no_other_file_and_runs_nothing() -> None:
    page = report([run(PLAIN, FAST), run(PLAIN, FAST, name="s/1")])
    assert re.findall(r"<(script|link rel=.stylesheet|img|iframe|object)|@import|url\((?!#)", page) == []
    elsewhere = [where for where in re.findall(r'(?:src|href)="([^"]*)"', page) if not where.startswith("#")]
    assert set(elsewhere) == {"data:,"}


def test_the_same_runs_give_the_same_page_whatever_settings_a_user_has_for_matplotlib() -> None:
    page = report([run(PLAIN, FAST)])
    with mpl.rc_context({"font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        assert report([run(PLAIN, FAST)]) == page


def test_every_picture_of_a_page_has_a_caption_and_a_text_with_its_values() -> None:
    page = report([run(PLAIN, FAST)])
    assert page.count("<figure>") == page.count("<figcaption>") == page.count('<svg role="img" aria-label="') == 5
    assert 'aria-label="ms/token, prompt by prompt: plain: 10.00 ms/token; speculative: 4.00 ms/token"' in page


def test_what_a_picture_refers_to_is_in_it() -> None:
    drawn = picture(figures.forecast_against_measured([run(PLAIN, FAST)]))
    references = set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', drawn))
    assert {left or right for left, right in references} <= set(re.findall(r'id="([^"]*)"', drawn))


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
        cells = [replace(CELL, quantization=text)]
        found = replace(named.summary, task=text, git_commit=text, draft=text, cells=cells, versions={text: text})
        named = replace(named, summary=found)
        return report([named] if is_one else [named, run(PLAIN, FAST, name=text)], missing=[text])

    evil = "\"'><script>alert(1)</script>&{{ runs }}</title></style><b onload='x'>"
    assert Elements(page(evil)).found == Elements(page("a harmless name of the same length or so, in one column")).found
    assert "&lt;script&gt;" in page(evil)


@pytest.mark.parametrize("name", ["$a_{b$", "_x", "\x00\x1b[2J\ud800", "模型 🦙", "m" * 500, "a\nb", ""])
def test_any_name_can_be_drawn(name: str) -> None:
    drawn = picture(figures.acceptance_by_position([run(PLAIN, FAST, model=name)]))
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "position 1: 66.7 % of 3" in said(drawn)[0]


def test_every_line_has_its_own_look_also_without_colours() -> None:
    runs = sweep(range(2, 2 + MOST_LINES))
    chart = figures.acceptance_by_position(runs, [str(number) for number in range(len(runs))])
    assert chart is not None
    looks = [(mark.colour, mark.shape) for mark in chart.legend.values()]
    assert len(looks) == len(set(looks)) == MOST_LINES
    assert all(left[1] != right[1] for left, right in pairwise(looks))
    dots = {(mark.colour, mark.shape) for mark in chart.marks if mark.kind is Kind.dot}
    assert dots == set(looks)
    assert figures.acceptance_by_position([*runs, runs[0]], [str(number) for number in range(len(runs) + 1)]) is None


def test_the_legend_shows_a_line_with_its_dots() -> None:
    chart = Chart(title="t", x_label="x", y_label="y", highest_x=1, highest_y=1)
    chart.line([(0, 0), (1, 1)], COLOURS[0], name="alone")
    without = plots.picture(chart).count("<use")
    chart.line([(0, 1), (1, 0)], COLOURS[1], name="with dots", shape="s")
    assert plots.picture(chart).count("<use") == without + 1


def test_the_rate_at_a_position_counts_the_rounds_that_examined_it() -> None:
    line = replace(FAST, num_rounds=4, accepted_lengths=[2, 0, 1, 2], examined_lengths=[2, 1, 2, 0])
    assert figures.position_rates([line]) == [(2 / 3, 3), (1 / 2, 2)]
    assert figures.position_rates([PLAIN]) == []


def test_the_parts_of_a_round_follow_each_other_and_add_up() -> None:
    chart = figures.round_timeline(run(PLAIN, FAST))
    assert said(picture(chart)) == [
        "draft step 1: 2.000 ms",
        "draft step 2: 2.000 ms",
        "verification and rule: 6.000 ms",
        "other: 1.000 ms",
    ]
    assert chart is not None
    assert "one row's share" in chart.title, "a batch shares its rounds out"
    ends = [(left, right) for (left, _), (right, _) in corners(chart, Kind.bar)]
    assert all(begin > end for (_, end), (begin, _) in pairwise(ends))


def test_forecasts_and_memory_stand_beside_what_was_measured() -> None:
    dots = said(picture(figures.forecast_against_measured([run(PLAIN, FAST)])))
    assert dots == ["s/0, plain: 9.00 forecast, 10.00 measured", "s/0, speculative: 4.50 forecast, 4.00 measured"]
    bars = said(picture(figures.memory_by_rank([run(PLAIN, FAST)])))
    assert bars == [f"rank {rank}: {size}" for rank in (0, 1) for size in ("3.00 GiB planned", "2.00 GiB measured")]
    assert len(said(picture(figures.memory_by_rank([run(PLAIN, FAST), run(PLAIN, FAST)])))) == 4


@pytest.mark.parametrize("figure", [figures.memory_by_rank, figures.acceptance_by_position])
def test_marks_stay_inside_the_axes(figure: Callable[[list[Run]], Chart | None]) -> None:
    chart = figure([run(PLAIN, FAST, num_draft_tokens=k, model=f"m{k}") for k in range(2, 12)])
    assert chart is not None
    places = [point for mark in chart.marks if mark.kind is not Kind.line for point in mark.points]
    assert places
    assert all(0 <= x <= chart.highest_x and 0 <= y <= chart.highest_y for x, y in places)
    assert all(right > left and top >= bottom for (left, bottom), (right, top) in corners(chart, Kind.bar))


def one_bar(height: float) -> Chart:
    chart = Chart(title="t", x_label="x", y_label="y", highest_x=1, highest_y=height)
    chart.bar(0.2, 0.8, height, COLOURS[0], says=f"{height}", name="bar")
    chart.line([(0, height), (1, height)], COLOURS[1])
    return chart


@pytest.mark.parametrize("highest", [1e-9, 0.03, 0.99, 1.0, 1.82, 7, 24.9, 330, 1e12])
def test_ticks_are_few_and_a_bar_of_the_highest_value_fills_the_axes(highest: float) -> None:
    drawn = plots.picture(one_bar(highest))
    heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", drawn.split("<title>")[1].split("/>")[0])]
    assert 0.85 < (max(heights) - min(heights)) / (plots.HEIGHT - plots.TOP - plots.BOTTOM) <= 1
    ticks = re.findall(r"text-anchor: end[^>]*>([^<]*)<", drawn)
    assert 3 <= len(ticks) <= 12
    assert len(set(ticks)) == len(ticks)


@pytest.mark.parametrize("highest", [0.0, float("nan"), float("inf"), -1.0, 5e-324, 1.7e308])
def test_an_axis_of_nothing_or_of_nonsense_is_drawn_all_the_same(highest: float) -> None:
    assert ">1.0<" in plots.picture(one_bar(highest))
