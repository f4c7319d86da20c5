"""The closing tables and the closing line, on terminals of different widths."""

import re
from dataclasses import replace
from io import StringIO

from rich.console import Console, RenderableType

from llama_ssp.reports.records import Forecast, PlainSummary, SpeculativeSummary
from llama_ssp.terminal.tables import benchmark_table, closing_line, summary_table
from tests.helpers import runs
from tests.helpers.runs import CELL, FAST, PLAIN

FULL_ROW = replace(
    CELL, num_draft_tokens=8, prompt_tokens=2048, batch_size=64, tokens_per_round=12.25,
    ms_per_token={"plain": 701.25, "speculative": 702.25, "generate": 703.25, "assisted": 704.25},
    forecast_ms_per_token={"plain": 600.5, "speculative": 500.5},
)  # fmt: skip
BOTH = replace(
    runs.summary(PLAIN, FAST), model="llama2_70B", draft="tinyllama_1B", world_size=8, num_new_tokens=384, memory=[],
    plain=PlainSummary(ms_per_token=240.2, tokens_per_s=4.163, num_target_forwards=192), speedup=2.127,
    speculative=SpeculativeSummary(
        ms_per_token=112.931, tokens_per_s=8.86, num_rounds=62, num_target_forwards=65, tokens_per_round=3.049,
        acceptance_rate=0.714, accepted_histogram=[5, 6, 7, 8, 36], draft_s=0.18, verify_s=0.36, other_s=0.06,
    ),
    forecast=Forecast(plain_ms_per_token=251, speculative_ms_per_token=110.5, speedup=2.27),
)  # fmt: skip
ALONE = replace(BOTH, speculative=None, speedup=None, forecast=Forecast())


def shown(table: RenderableType, *, width: int = 80) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_the_table_is_aligned_within_80_columns() -> None:
    assert [line.rstrip() for line in shown(summary_table(BOTH)).splitlines()] == [
        "",
        "llama2_70B with tinyllama_1B, K = 4: 1 prompt, 384 tokens, 8 ranks",
        "",
        "                                           tokens",
        "             ms/token  forecast  tokens/s  /round  accepted  speed-up  forecast",
        "───────────────────────────────────────────────────────────────────────────────",
        "plain          240.20    251.00       4.2       -         -         -         -",
        "speculative    112.93    110.50       8.9    3.05      71 %     2.13x     2.27x",
        "ms/token of a completion, prompt included; tokens/s over all rows and replicas",
        "",
        "a round:  draft 30 %  verify 60 %  other 10 %  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━",
    ]


def test_a_tree_is_named_by_its_shape_and_not_by_a_number_of_tokens() -> None:
    text = shown(summary_table(replace(BOTH, tree="3x2x1")))
    assert "llama2_70B with tinyllama_1B, tree 3x2x1: 1 prompt" in text
    assert "K =" not in text


def test_a_mode_or_a_forecast_that_does_not_exist_has_no_line_or_a_dash() -> None:
    text = shown(summary_table(ALONE))
    assert re.search(r"plain +240\.20 +- +4\.2 ", text)
    assert "speculative" not in text
    assert "a round" not in text


def test_a_benchmarks_table_has_forecasts_next_to_measurements() -> None:
    cells = shown(benchmark_table([FULL_ROW])).splitlines()[-1].split()
    assert " ".join(cells) == "8 2048 64 701.25 600.50 703.25 702.25 500.50 704.25 12.25 4 % 99 %"


def test_the_time_to_the_first_token_names_its_mode() -> None:
    plain, fast = replace(PLAIN, first_token_ms=3.7), replace(FAST, first_token_ms=4.6)
    both, alone = (shown(summary_table(runs.summary(*lines))) for lines in ((plain, fast), (PLAIN, fast)))
    assert "first token: plain after 3.7 ms, speculative after 4.6 ms\n" in both
    assert "first token: speculative after 4.6 ms\n" in alone


def test_the_closing_line_names_no_mode_where_there_was_one() -> None:
    rates = "112.93 ms/token, 8.9 tokens/s, 3.05 tokens/round"
    assert closing_line(BOTH).plain == f"384 tokens for 1 prompt: speculative {rates}"
    assert closing_line(ALONE).plain == "384 tokens for 1 prompt: 240.20 ms/token, 4.2 tokens/s"
