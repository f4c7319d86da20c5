"""The closing tables on terminals of different widths."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from llama_ssp.console.tables import benchmark_table, summary_table
from tests.helpers.runs import CELL, FAST, PLAIN, summary

ROW = replace(
    CELL, prompt_tokens=512, batch_size=16, forecast_ms_per_token={"plain": 120.0, "speculative": 119.5},
    ms_per_token=dict.fromkeys(("plain", "generate", "speculative", "assisted"), 123.45),
)  # fmt: skip
TABLES = {"summary": summary_table(summary(PLAIN, FAST)), "benchmark": benchmark_table([ROW])}


def written(table: RenderableType, *, width: int) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table)
    return console.export_text()


def shown(table: str, *, width: int) -> str:
    return written(TABLES[table], width=width)


def test_the_time_to_the_first_token_names_its_mode() -> None:
    plain, fast = replace(PLAIN, first_token_ms=3.7), replace(FAST, first_token_ms=4.6)
    both, alone = (written(summary_table(summary(*lines)), width=80) for lines in ((plain, fast), (PLAIN, fast)))
    assert "first token: plain after 3.7 ms, speculative after 4.6 ms\n" in both
    assert "first token: speculative after 4.6 ms\n" in alone


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
