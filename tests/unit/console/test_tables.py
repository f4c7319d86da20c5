"""The closing tables on terminals of different widths."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from llama_ssp.console.tables import benchmark_table, summary_table
from tests.helpers.runs import CELL, FAST, PLAIN, summary

ROW = replace(
    CELL, prompt_tokens=512, batch_size=16, forecast_ms_per_token={"plain": 120.0, "speculative": 119.5},
    ms_per_token=dict.fromkeys(("plain", "generate", "speculative", "assisted"), 123.45),
)  # fmt: skip
TABLES = {"summary": summary_table(summary(PLAIN, FAST)), "benchmark": benchmark_table([ROW])}


def shown(table: str, *, width: int) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(TABLES[table])
    return console.export_text()


@pytest.mark.parametrize("table", TABLES)
def test_eighty_columns_have_room_for_forecasts(table: str) -> None:
    assert "…" not in shown(table, width=80)
    assert "fore" in shown(table, width=80).replace(", forecast", "")


@pytest.mark.parametrize("table", TABLES)
def test_a_narrower_terminal_leaves_forecasts_out_and_cuts_no_word(table: str) -> None:
    text = shown(table, width=60).replace(", forecast", "")  # that of memory, on its own line
    assert "…" not in text
    assert "fore" not in text
    assert max(map(len, text.splitlines())) <= 60
