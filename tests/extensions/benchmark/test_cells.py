"""The cells of a benchmark: their tables, and their way into summaries and back."""

import json
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from llama_ssp import manifest
from llama_ssp.extensions.benchmark.cells import BenchmarkCell
from llama_ssp.reports.records import Summary
from llama_ssp.settings.tasks import TASKS
from llama_ssp.terminal.tables import results_table
from tests.helpers.runs import PLAIN, summary

CELL = BenchmarkCell(
    model="big",
    draft="small",
    dtype="fp32",
    quantization="none",
    world_size=1,
    temperature=0.8,
    max_new_tokens=64,
    num_draft_tokens=4,
    prompt_tokens=16,
    batch_size=1,
    ms_per_token={"plain": 2.0, "speculative": 2.5},
    forecast_ms_per_token={"plain": 600.5},
    tokens_per_round=2.9,
    other_share=0.04,
    copy_share=0.99,
    text_sha256="",
    versions={"torch": "2.13.0"},
    git_commit=None,
)
FULL_ROW = replace(
    CELL,
    num_draft_tokens=8,
    prompt_tokens=2048,
    batch_size=64,
    tokens_per_round=12.25,
    ms_per_token={"plain": 701.25, "speculative": 702.25, "generate": 703.25, "assisted": 704.25},
    forecast_ms_per_token={"plain": 600.5, "speculative": 500.5},
)


def test_a_table_has_forecasts_next_to_measurements() -> None:
    console = Console(width=80, file=StringIO(), record=True)
    console.print(results_table([FULL_ROW]))
    cells = console.export_text().splitlines()[-1].split()
    assert " ".join(cells) == "8 2048 64 701.25 600.50 703.25 702.25 500.50 704.25 12.25 4 % 99 %"


def test_a_report_has_a_row_for_each_cell() -> None:
    shown = BenchmarkCell.on_page([CELL, FULL_ROW])
    assert [len(row) for row in shown.rows] == [len(shown.columns)] * 2
    assert shown.rows[0][:3] == ["prompt 16, batch 1, K = 4", "2.00", "600.50"]


def test_cells_come_back_from_a_summary_and_count_among_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(summary(PLAIN), task="benchmark", cells=[CELL, FULL_ROW])
    text = json.dumps(asdict(found))
    assert Summary.from_json(text) == found
    assert [cell.figures[1:3] for cell in found.cells] == [(1, 64), (64, 64 * 64)]
    with pytest.raises(ValueError, match=r"batch_size holds '1'"):
        Summary.from_json(text.replace('"batch_size": 1,', '"batch_size": "1",'))
    with pytest.raises(ValueError, match="task=compare has no cells"):
        Summary.from_json(text.replace('"task": "benchmark"', '"task": "compare"'))
    monkeypatch.setattr(manifest, "present", lambda: ())
    monkeypatch.delitem(TASKS.records, "benchmark")
    with pytest.raises(ValueError, match="task=benchmark needs the benchmark extension"):
        Summary.from_json(text)
