"""The table of a search."""

import io
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from llama_ssp.extensions.advice.search import Search, search
from llama_ssp.extensions.advice.tables import print_search, printed
from llama_ssp.machines import hardware
from llama_ssp.settings.schema import DraftLayout
from tests.helpers.extensions import need
from tests.helpers.planning import make_spec

A10G = hardware.load("g5_12xlarge")


@cache
def choices() -> list[dict[str, Any]]:
    """What the planner suggests for a large model on four small GPUs."""
    return search(make_spec("65B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded), A10G)


def searched(found: list[dict[str, Any]] | None = None) -> Search:
    return Search(machine=A10G, choices=choices() if found is None else found)


def _console(width: int, found: list[dict[str, Any]] | None = None) -> Console:
    console = Console(record=True, width=width, file=io.StringIO())
    print_search(searched(found), console)
    return console


@pytest.mark.seconds
def test_the_ranking_shows_all_sizes_what_is_missing_and_what_figures_rest_on() -> None:
    need("eight_bits")
    need("four_bits")
    text = " ".join(_console(110).export_text().split())
    assert "65B int8wo" in text
    assert f"5 of {len(choices())}, which format=full has" in text
    assert "ms/token of a completion after its first token, tokens/s over all rows and replicas" in text
    assert "forecast by data sheet" in text


def test_all_rows_are_shown_in_full() -> None:
    console = Console(record=True, width=110, file=io.StringIO())
    print_search(searched(choices()[:12]), console, is_full=True)
    text = console.export_text()
    assert "all 12. ms/token" in text
    rows = [int(number) for number in re.findall(r"^ +(\d+) 65B", text, re.MULTILINE)]
    assert rows == [one["rank"] for one in choices()[:12]]


def test_five_rows_are_shown_the_fastest_of_each_precision_of_the_asked_model_before_any_other() -> None:
    shown = printed(choices())
    assert {one["target"] for one in shown} == {"65B"}
    assert len(shown) == 5
    fitting = [one for one in choices() if one["target"] == "65B" and one["reason"] is None]
    for quantization in {one["quantization"] for one in fitting}:
        assert next(one for one in fitting if one["quantization"] == quantization) in shown
    assert [one["rank"] for one in shown] == sorted(one["rank"] for one in shown)


def test_a_model_that_does_not_fit_is_struck_out_above_the_largest_one_that_does() -> None:
    need("eight_bits")
    need("four_bits")
    found = search(make_spec("65B", "7B"), replace(A10G, num_gpus=1))
    first, *others = printed(found)
    assert (first["target"], first["ms_per_token"]) == ("65B", None)
    assert len(others) == 4
    assert all(one["target"] == "30B" and one["reason"] is None for one in others)
    assert "line-through" in _console(110, found).export_html()


@pytest.mark.seconds
def test_overlap_says_in_its_row_that_it_is_untried_on_several_gpus_and_80_columns_cut_nothing() -> None:
    found = search(make_spec("65B", "7B", num_ranks=8), hardware.load("8xa100_80gb"))
    best = next(choice for choice in found if choice["overlaps"])
    text = _console(80, [best | {"rank": 1}, *found[:3]]).export_text()
    assert re.search(r"own_gpu, overlaps,.*\n.*untried", text)
    assert "untried: drafting while the target verifies has never run on several GPUs" in text
    assert "…" not in text


def test_every_row_has_its_command_in_one_line() -> None:
    lines = [line.split() for line in _console(80).export_text().splitlines()]
    assert all([str(one["rank"]), "llama-ssp", "plan", *one["settings"]] in lines for one in printed(choices()))
