"""The report shows what was measured, alone in one file, whatever stands in the records."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from llama_ssp.reports import figures
from llama_ssp.reports.html import report
from llama_ssp.reports.lines import CompletionLine
from llama_ssp.reports.runs import Run
from llama_ssp.reports.svg import nice_ticks
from tests.helpers.runs import FAST, PLAIN, summary

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)


def run(*lines: CompletionLine, name: str = "s/0", model: str = "big", num_draft_tokens: int = 2) -> Run:
    draft = "small" if any(line.mode == "speculative" for line in lines) else None
    found = summary(*lines, model=model, draft=draft, num_draft_tokens=num_draft_tokens)
    return Run(name=name, status="done", summary=found, lines=lines)


def drawn(figure: str | None) -> ElementTree.Element:
    assert figure is not None
    return ElementTree.fromstring(figure)


def said(figure: str | None, element: str) -> list[str]:
    """What each mark says under the pointer."""
    return [mark[0].text or "" for mark in drawn(figure).iter(element)]


def test_the_report_of_a_run_has_every_figure_and_number() -> None:
    page = report([run(PLAIN, FAST)])
    for title in ("A round of spec", "Acceptance by position", "Forecast against", "Speed-up over", "Memory, planned"):
        assert title in page
    assert "<b>2.50x</b><span>speed-up" in page
    assert "<b>60 %</b>" in page


def test_the_report_of_a_sweep_has_a_row_and_a_section_for_every_run() -> None:
    page = report([run(PLAIN, FAST, name=f"s/{k}", num_draft_tokens=k) for k in (2, 3)], missing=["s/4 has no summary"])
    assert page.count("<details>") == 2
    assert page.count("<tr>") == 3
    assert "s/4 has no summary" in page


def test_nothing_is_drawn_that_was_not_measured() -> None:
    page = report([run(PLAIN)])
    assert "Memory, planned" in page
    for title in ("A round of spec", "Acceptance by position", "Speed-up over"):
        assert title not in page


def test_the_page_needs_no_other_file_and_runs_nothing() -> None:
    page = report([run(PLAIN, FAST), run(PLAIN, FAST, name="s/1")])
    assert re.findall(r"<(script|link rel=.stylesheet|img|iframe|object)|@import|url\(", page) == []
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,"}


def test_names_from_records_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>&\"'"
    page = report([run(PLAIN, FAST, model=evil, name=evil), run(PLAIN, FAST, name=evil)], missing=[evil])
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_rate_at_a_position_counts_the_rounds_that_examined_it() -> None:
    line = replace(FAST, num_rounds=4, accepted_lengths=[2, 0, 1, 2], examined_lengths=[2, 1, 2, 0])
    assert figures.position_rates([line]) == [(2 / 3, 3), (1 / 2, 2)]
    assert figures.position_rates([PLAIN]) == []


def test_speedups_of_one_pair_and_k_are_averaged_and_others_stand_apart() -> None:
    slow = replace(FAST, ms=80.0)
    bars = said(
        figures.speedup_by_k([run(PLAIN, FAST), run(PLAIN, slow), run(PLAIN, FAST, num_draft_tokens=5)]), "rect"
    )
    assert bars == ["big + small, K=2: 1.88x, mean of 2 runs", "big + small, K=5: 2.50x"]
    assert len(said(figures.speedup_by_k([run(PLAIN, FAST), run(PLAIN, FAST, model="huge")]), "rect")) == 2


def test_the_parts_of_a_round_follow_each_other_and_add_up() -> None:
    marks = said(figures.round_timeline(run(PLAIN, FAST)), "rect")
    assert marks == [
        "draft step 1: 2.000 ms",
        "draft step 2: 2.000 ms",
        "verification and rule: 6.000 ms",
        "other: 1.000 ms",
    ]
    bars = list(drawn(figures.round_timeline(run(PLAIN, FAST))).iter("rect"))
    ends = [float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in bars]
    starts = [float(bar.attrib["x"]) for bar in bars]
    assert all(start > end for start, end in zip(starts[1:], ends[:-1], strict=True))


def test_forecasts_and_memory_stand_beside_what_was_measured() -> None:
    dots = said(figures.forecast_against_measured([run(PLAIN, FAST)]), "circle")
    assert dots == ["s/0, plain: 9.00 forecast, 10.00 measured", "s/0, speculative: 4.50 forecast, 4.00 measured"]
    bars = said(figures.memory_by_rank([run(PLAIN, FAST)]), "rect")
    assert bars == [f"rank {rank}: {size}" for rank in (0, 1) for size in ("3.00 GiB planned", "2.00 GiB measured")]
    assert len(said(figures.memory_by_rank([run(PLAIN, FAST), run(PLAIN, FAST)]), "rect")) == 4


@pytest.mark.parametrize("figure", [figures.speedup_by_k, figures.memory_by_rank, figures.acceptance_by_position])
def test_marks_stay_inside_the_picture(figure: object) -> None:
    assert callable(figure)
    picture = drawn(figure([run(PLAIN, FAST, num_draft_tokens=k, model=f"m{k}") for k in range(2, 12)]))
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for bar in picture.iter("rect"):
        x, y, w, h = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    for dot in picture.iter("circle"):
        assert 0 <= float(dot.attrib["cx"]) <= width
        assert 0 <= float(dot.attrib["cy"]) <= height


@pytest.mark.parametrize("highest", [1e-9, 0.03, 0.99, 1.0, 1.82, 7, 24.9, 330, 1e12])
def test_ticks_are_few_and_reach_the_highest_value(highest: float) -> None:
    ticks = nice_ticks(highest)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    assert highest * (1 - 1e-6) <= ticks[-1] <= 1.6 * highest
    assert all(len(f"{tick / ticks[1]:g}") == len(str(place)) for place, tick in enumerate(ticks))


@pytest.mark.parametrize("highest", [0.0, float("nan"), float("inf"), -1.0])
def test_an_axis_of_nothing_has_ticks_all_the_same(highest: float) -> None:
    assert nice_ticks(highest) == [0.0, 1.0]


@pytest.mark.skipif(
    CHROMIUM is None, reason="needs a headless Chromium (Debian: apt-get install chromium-headless-shell)"
)
def test_a_browser_shows_the_figures_and_has_no_complaint(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report([run(PLAIN, FAST, name=f"s/{k}", num_draft_tokens=k) for k in (2, 3)]))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={tmp_path}"]
    options += ["--window-size=1200,1000", f"--screenshot={tmp_path}/page.png", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *options, file.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") == 4 + 2 * 5
    assert (tmp_path / "page.png").stat().st_size > 20_000
