"""Table and figure of a search."""

import io
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llama_ssp.machines import hardware
from llama_ssp.planning.search import search
from llama_ssp.reports.charts import Kind
from llama_ssp.reports.plan_figures import draw, time_by_ranks
from llama_ssp.reports.plan_tables import print_document, printed
from llama_ssp.settings.schema import DraftLayout
from tests.helpers.planning import make_job

A10G = hardware.load("g5_12xlarge")


@cache
def choices() -> list[dict[str, Any]]:
    """What the planner suggests for a large model on four small GPUs."""
    return search(make_job("65B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded), A10G)


def document(found: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"search": choices() if found is None else found, "basis": "a basis", "notes": []}


def _console(width: int) -> Console:
    console = Console(record=True, width=width, file=io.StringIO())
    print_document(document(), machine=A10G.name, unit=A10G.unit, console=console)
    return console


def test_the_ranking_shows_all_sizes_and_what_is_missing() -> None:
    html = _console(110).export_html()
    assert "65B int8wo" in html
    assert "31.8 of 22.2" in html
    assert "line-through" in html


def test_the_table_says_what_its_figures_mean_and_what_they_rest_on() -> None:
    text = " ".join(_console(110).export_text().split())
    assert "ms/token of a completion after its first token, tokens/s over all rows and replicas" in text
    assert "a basis" in text


@pytest.mark.parametrize("width", [80, 110, 300])
def test_every_row_has_the_settings_to_copy_in_one_line_at_every_width(width: int) -> None:
    lines = [" ".join(line.split()) for line in _console(width).export_text().splitlines()]
    by_target = [[one for one in choices() if one["target"] == target] for target in ("7B", "13B", "30B", "65B")]
    fitting = [one for of_one in by_target for one in printed(of_one) if one["reason"] is None]
    assert len(fitting) > 20
    for one in fitting:
        assert any(" ".join(one["settings"]) in line for line in lines), one["settings"]
    assert any(line.startswith("To plan or run a choice") for line in lines) is (width < 200)


def test_a_table_of_80_columns_cuts_nothing() -> None:
    assert "…" not in _console(80).export_text()


def test_a_tight_choice_is_called_tight() -> None:
    console = Console(record=True, width=110, file=io.StringIO())
    (first, *_) = choices()
    tight = first | {"is_tight": True}
    print_document(document([tight]), machine=A10G.name, unit="GPU", console=console)
    assert "tight" in console.export_text()
    assert "tight" not in _console(110).export_text() or any(one["is_tight"] for one in choices())


def test_the_figure_has_the_fastest_choice_of_the_asked_model_for_every_size() -> None:
    chart = time_by_ranks(choices(), unit="GPU")
    dots = {mark.points[0]: mark.says for mark in chart.marks if mark.kind is Kind.dot}
    for size in (1, 2, 4):
        fitting = [
            one["ms_per_token"]
            for one in choices()
            if one["target"] == "65B" and one["num_ranks"] == size and one["ms_per_token"]
        ]
        assert (float(size), min(fitting)) in dots if fitting else all(x != size for x, _ in dots)
    assert any("with a draft" in says for says in dots.values())


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_figure_is_drawn(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"search.{suffix}"
    draw(document(), file, machine=A10G.name, unit="GPU")
    assert file.stat().st_size > 1000


def test_a_search_in_which_nothing_fits_is_drawn_empty(tmp_path: Path) -> None:
    small = replace(A10G, num_gpus=1, memory_bytes=2**30)
    found = search(make_job("65B", "7B"), small)
    draw(document(found), tmp_path / "search.svg", machine=small.name, unit="GPU")
