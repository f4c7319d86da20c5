"""Measured pages: every figure comes from the newest stored row, and nothing is said without one."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import measured, overlap, placements, readme


def test_the_ratios_of_the_front_page_are_those_of_the_figures_beside_them() -> None:
    """The row's own ratios are of single turns, and differ from what a reader computes."""
    row = measured.stored("peers")[-1] | {"plain_to_generate": 9.0, "speculative_to_assisted": 9.0, "speedup": 9.0}
    text = readme.peers_text(row)
    lines = [line.replace("*", "").split("|")[2:5] for line in text.splitlines() if line.startswith(("| pl", "| sp"))]
    (plain, generate, ratio), (speculative, assisted, other) = ([float(cell) for cell in cells] for cells in lines)
    assert f"{plain / generate:.2f} {speculative / assisted:.2f}" == f"{ratio:.2f} {other:.2f}"
    assert f"Speculation gains {plain / speculative:.2f}x over" in text
    bound = re.search(r"at ([\d.]+) ms; measured is ([\d.]+) ms, ([\d.]+) times", readme.round_text(row))
    assert bound
    assert f"{float(bound[2]) / float(bound[1]):.2f}" == bound[3]


def test_a_refused_cell_is_a_dash_with_its_reason_and_has_no_ratios() -> None:
    row = measured.stored("placements")[-1]
    nothing = {"round_ms": None, "tokens_per_round": None, "refused": "no kernel"}
    cells = [each | nothing if each["form"] == "nf4" else each for each in row["cells"]]
    text = placements.document(row | {"cells": cells})
    tables, _, reasons = text.partition("## Not measured")
    assert tables.count("| - |") > text.count("no kernel") / 2
    assert f"- {placements.ALONE}, nf4: no kernel\n" in reasons
    assert "| nf4 |" not in placements.precision(row | {"cells": cells})


def test_overlapped_rounds_as_the_model_has_them_gain_what_the_model_says() -> None:
    row = measured.stored("overlap")[-1]
    found = overlap.Comparison(row=row)
    before, after = (found.at(4, overlaps=overlaps) for overlaps in (False, True))
    gain = found.modelled_gain(4)
    sequential = {**before, "num_rounds": 1, "num_tokens": 1, "round_s": gain * overlap.ms_per_token(after) / 1e3}
    apart = [sequential if each == before else each for each in row["apart"]]
    assert overlap.Comparison(row=row | {"apart": apart}).gain(4) == pytest.approx(gain)
    assert gain > 1


def test_regions_are_filled_from_the_newest_row_and_empty_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = measured.stored("placements")[-1] | {"processor": "abacus"}
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    full = "a\n<!-- measured: placements -->\nold\n<!-- end -->\nb\n"
    assert readme.filled(full) == "a\n<!-- measured: placements -->\n<!-- end -->\nb\n"
    assert readme.made_files() == {}
    rows = [json.dumps(new | {"processor": "quill"}), json.dumps(new)]
    (tmp_path / "placements.jsonl").write_text("\n".join(rows) + "\n")
    assert "an abacus" in readme.filled(full)
    assert "old" not in readme.filled(full)
    assert "an abacus" in readme.made_files()["docs/benchmarks/placements.md"]
