"""The tables of a sweep: a row for each run, with its settings, medians, intervals and percentiles."""

import csv
import io
import random
from dataclasses import replace

import pytest

from llama_ssp.reports.measures import measure
from llama_ssp.reports.runs import varying_settings
from llama_ssp.reports.tables import percentiles_table, runs_table, runs_to_csv
from tests.helpers.runs import FAST, PLAIN, run
from tests.helpers.sweeps import PLAIN_MS, simulated_sweep

pytestmark = pytest.mark.seconds


def test_runs_csv_has_a_row_for_each_run_with_its_settings_and_intervals() -> None:
    runs = simulated_sweep(random.Random(0))
    rows = list(
        csv.DictReader(io.StringIO(runs_to_csv(runs, [measure(one.lines) for one in runs], varying_settings(runs))))
    )
    assert [(row["run"], row["sampling.temperature"], row["speculation.num_draft_tokens"]) for row in rows] == [
        ("sweep/0", "0.0", "2"), ("sweep/1", "0.0", "4"), ("sweep/2", "1.0", "2"), ("sweep/3", "1.0", "4"),
    ]  # fmt: skip
    for row in rows:
        for name in ("plain_ms_per_token", "speculative_ms_per_token", "speedup", "acceptance"):
            assert float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"])
        assert float(row["plain_ms_per_token"]) == pytest.approx(PLAIN_MS, rel=0.3)
        assert 2 * float(row["plain_ms_per_token_p50"]) == pytest.approx(float(row["plain_first_token_ms_p50"]))
        assert (row["num_paired"], row["forecast_speedup"]) == ("15", "2.0")


def test_a_run_of_one_mode_has_empty_columns_for_the_other() -> None:
    found = run(PLAIN)
    (row,) = csv.DictReader(io.StringIO(runs_to_csv([found], [measure(found.lines)], [])))
    assert (row["plain_ms_per_token"], row["speculative_ms_per_token"], row["speedup"], row["acceptance"]) == (
        "10.0", "", "", "",
    )  # fmt: skip


def test_tables_have_a_cell_for_every_column() -> None:
    runs = [*simulated_sweep(random.Random(0)), run(PLAIN)]
    measures, settings = [measure(one.lines) for one in runs], varying_settings(runs)
    tables = [runs_table(runs, measures, settings), percentiles_table(measures, settings)]
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert len(tables[0].rows) == 5
    assert len(tables[1].rows) == 9


def test_columns_that_no_run_fills_are_left_out() -> None:
    runs = [replace(run(PLAIN), status=""), replace(run(PLAIN, name="s/1"), status="")]
    table = runs_table(runs, [measure(one.lines) for one in runs], [])
    assert table.columns == ["#", "plain, ms/token", "prompts", "tokens", "run"]
    assert {len(row) for row in table.rows} == {5}


def test_speedups_are_paired_by_prompt_and_not_by_totals() -> None:
    slow_and_fast = [
        replace(PLAIN, index=1, ms=1000.0),
        replace(FAST, index=1, ms=100.0),
        replace(FAST, index=2, ms=1.0),
    ]
    measured = measure([PLAIN, FAST, *slow_and_fast])
    assert measured.speedup
    assert measured.speedup.value == pytest.approx((2.5 + 10.0) / 2)
    assert (len(measured.pairs), measured.num_faster) == (2, 2)


def test_turns_of_a_conversation_and_samples_of_a_prompt_are_one_prompt() -> None:
    turns = [replace(PLAIN, index=index, turn=index, sample=sample) for index in range(2) for sample in range(3)]
    (mode,) = measure([*turns, replace(PLAIN, index=2, ms=200.0)]).modes.values()
    assert (mode.ms_per_token.value, mode.num_completions) == (15.0, 7), "the median of two prompts"
