"""What the repository says of measurements: every figure comes from the row, and nothing is said without one."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from benchmarks import lengths, placement_cells, placement_pages, readme, sweep
from benchmarks.by_format import lines as by_format
from benchmarks.curves import fit
from benchmarks.placements import Figures
from llama_ssp.commands import command_line
from llama_ssp.config import checks, folders, store
from llama_ssp.config.schema import TargetKind
from llama_ssp.reports.charts import Kind
from tests.helpers.pictures import said

MADE_BY: dict[str, Any] = {
    "versions": {"torch": "2"}, "git_commit": "c0ffee", "processor": "abacus", "num_threads": 2, "num_draft_tokens": 4,
    "target": "tiny", "draft": "tiny-draft",
}  # fmt: skip
FACTORS = {"fp32": 1.0, "bf16": 0.8, "int8": 2.5, "int8_weight_only": 1.01, "draft int8": 1.5}


def placements_row() -> dict[str, Any]:
    """Every line in some forms; the others were refused."""
    cells = [
        Figures(
            place=place.name, form=form.name, num_ranks=place.num_ranks, batch_size=place.batch_size,
            **(
                {"round_ms": 4 * FACTORS[form.name], "tokens_per_round": 1.25}
                if form.name in FACTORS else {"refused": "no kernel"}
            ),
        )
        for place in placement_cells.PLACES for form in placement_cells.FORMS
    ]  # fmt: skip
    return MADE_BY | {"cells": [asdict(each) for each in cells], "target_bytes": dict.fromkeys(FACTORS, 3 * 2**20)}


def lengths_row() -> dict[str, Any]:
    """Every kind of series grows in its own straight line, the speculative ones by twice as much."""
    series = {}
    for number, kind in enumerate(lengths.TITLES):
        for mode, factor in (("plain", 1), ("speculative", 2)):
            points = [(place, 1 + factor * (number + 1) * place / 100) for place in (1.0, 2.0, 3.0, 4.0)]
            places, ms = map(list, zip(*points, strict=True))
            series[f"{kind}, {mode}"] = {"places": places, "ms_per_token": ms, "fit": asdict(fit(points))}
    return MADE_BY | {"series": series}


def sweep_row() -> dict[str, Any]:
    ours, all_four = {"plain": 2.0, "speculative": 1.0}, dict.fromkeys(sweep.CANDIDATES, 3.0)
    cell = {"num_draft_tokens": 4, "prompt_tokens": 64, "batch_size": 1, "dtype": "fp32", "quantization": "none"}
    named = {name: [cell | {"ms_per_token": all_four}] for name in sweep.launches(sweep.LISTS)}
    named["model.quantization=int8_weight_only"] = [cell | {"quantization": "int8_weight_only", "ms_per_token": ours}]
    return MADE_BY | {"runs": named}


ROWS = {"placements": placements_row, "lengths": lengths_row, "sweep": sweep_row}


def test_the_document_has_a_line_for_each_place_and_a_reason_for_each_refusal() -> None:
    text = placement_pages.document(placements_row())
    first_table = text.partition("## Ratio to fp32")[0]
    for place in placement_cells.PLACES:
        assert f"| {place.name} | 4.00 | 3.20 | - | 10.00 |" in first_table
    assert text.count("no kernel") == 1
    refused = ", ".join(form.name for form in placement_cells.FORMS if form.name not in FACTORS)
    assert text.count(f"({refused})") == len(placement_cells.PLACES)


def without(kind: TargetKind) -> dict[str, Any]:
    """A row of a machine without what a kind of target needs."""
    row = placements_row()
    places = {place.name for place in placement_cells.PLACES if place.placement.target.kind is kind}
    nothing = {"round_ms": None, "tokens_per_round": None, "refused": "it is not installed"}
    return row | {"cells": [each | nothing if each["place"] in places else each for each in row["cells"]]}


def test_places_that_need_deepspeed_are_lines_where_it_is_installed_and_named_where_it_is_not() -> None:
    names = [
        placement_cells.DEEPSPEED_ALONE, placement_cells.DEEPSPEED,
        placement_cells.CUT_ALONE, f"{placement_cells.CUT}, draft one_rank",
    ]  # fmt: skip
    tables, _, reasons = placement_pages.document(without(TargetKind.deepspeed)).partition("## Not measured")
    for name in names:
        assert f"| {name} | 4.00 |" in placement_pages.document(placements_row())
        assert f"| {name} |" not in tables
        assert reasons.count(f" {name} (fp32, ") == 1
    assert reasons.count("it is not installed") == 1


def test_deepspeed_is_measured_in_fp32_on_one_rank_and_on_two() -> None:
    forms = [form.name for form in placement_cells.FORMS]
    taken = {
        num_ranks: [
            (cell.place.name, cell.form.name)
            for cell in placement_cells.cells(num_ranks, forms)
            if cell.place.placement.target.kind is TargetKind.deepspeed
        ]
        for num_ranks in (1, 2)
    }
    fp32, cut = placement_cells.FP32, placement_cells.CUT
    assert taken == {
        1: [(placement_cells.DEEPSPEED_ALONE, fp32), (placement_cells.DEEPSPEED, fp32)],
        2: [(placement_cells.CUT_ALONE, fp32), (f"{cut}, draft one_rank", fp32)],
    }


def test_the_guide_says_what_gains_and_what_costs() -> None:
    text = placement_pages.precision(placements_row())
    assert "| bf16 | 3 | 0.80 | 0.80 | 1.25x |" in text
    assert "8 or 4 bits in the target lengthen a round: int8 150%." in text
    assert "8 bits in the draft lengthen a round: draft int8 50%." in text
    assert "16 bits in both models shorten a round: bf16 20%." in text


def test_the_ratios_of_the_front_page_are_those_of_the_figures_beside_them() -> None:
    """The row's own ratios are of single turns, and differ from what a reader computes."""
    row = readme.stored("peers")[-1] | {"plain_to_generate": 9.0, "speculative_to_assisted": 9.0, "speedup": 9.0}
    text = readme.peers_text(row)
    lines = [line.replace("*", "").split("|")[2:5] for line in text.splitlines() if line.startswith(("| pl", "| sp"))]
    (plain, generate, ratio), (speculative, assisted, other) = ([float(cell) for cell in cells] for cells in lines)
    assert f"{plain / generate:.2f} {speculative / assisted:.2f}" == f"{ratio:.2f} {other:.2f}"
    assert f"Speculation gains {plain / speculative:.2f}x over" in text
    bound = re.search(r"at ([\d.]+) ms; measured is ([\d.]+) ms, ([\d.]+) times", readme.round_text(row))
    assert bound
    assert f"{float(bound[2]) / float(bound[1]):.2f}" == bound[3]


def test_the_ratios_of_number_formats_are_those_of_the_medians() -> None:
    figures = [
        by_format.Figures(column="8 bits", library=library, label=library, ms={"plain": ms}, tokens_per_round=None)
        for library, ms in ((by_format.OURS, [1.0, 2.0, 30.0]), ("other", [4.0, 1.0, 40.0]))
    ]
    assert [goal.measured for goal in by_format.goals(figures)] == [2.0 / 4.0]


def test_the_figure_of_lengths_has_a_dot_for_each_point_and_a_line_for_each_fit() -> None:
    dots = said(lengths.draw(lengths_row()))
    assert len(dots) == 4 * 2 * 4
    assert "plain, 1 tokens of context: 1.010 ms/token" in dots
    assert "speculative, 4 pause, ms: 1.320 ms/token" in dots
    lines = [[mark for mark in chart.marks if mark.kind is Kind.line] for chart in lengths.charts(lengths_row())]
    assert list(map(len, lines)) == [2] * 4


def test_what_is_said_of_lengths_tells_the_terms_and_both_controls() -> None:
    text = readme.lengths_text(lengths_row())
    assert text.count("no quadratic term") == 4
    assert "of the text adds +12.0% (plain) and +24.0% (speculative)" in text
    assert "pause of 4 ms in which nothing runs, a round takes +16.0% (plain) and +32.0% (speculative)" in text


def test_the_figure_of_a_sweep_has_a_bar_for_each_candidate_that_was_measured() -> None:
    bars = said(sweep.draw(sweep_row()))
    assert len(bars) == 3 * 4 + 4 + 4 + 2
    assert "ours, speculative, int8_weight_only: 1.00 ms" in bars


def test_every_launch_of_a_sweep_passes_the_checks() -> None:
    store.register()
    for words in sweep.launches(sweep.LISTS).values():
        overrides = ["task=benchmark", f"max_new_tokens={sweep.NEW_TOKENS}", *words]
        with initialize_config_dir(str(folders.conf_dir()), version_base="1.3"):
            config = compose("config", overrides)
        explicit = command_line.explicit_keys(overrides)
        checks.check(store.to_run_config(config, explicit=explicit), explicit, world_size=1)


def test_every_place_passes_the_checks_in_fp32() -> None:
    for num_ranks in (1, 2):
        for cell in placement_cells.cells(num_ranks, [placement_cells.FP32]):
            checks.check(cell.config(4), frozenset(), world_size=num_ranks)


def test_regions_are_filled_from_the_newest_row_and_empty_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    empty = "a\n<!-- measured: placements -->\n<!-- end -->\nb\n"
    full = "a\n<!-- measured: placements -->\nold\n<!-- end -->\nb\n"
    assert readme.filled(full) == readme.filled(empty) == empty
    assert readme.made_files() == {}
    for name, make in ROWS.items():
        old = make() | {"processor": "a quill"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(old) + "\n" + json.dumps(make()) + "\n")
    assert "an abacus" in readme.filled(full)
    assert "old" not in readme.filled(full)
    assert set(readme.made_files()) == set(readme.FILES)
