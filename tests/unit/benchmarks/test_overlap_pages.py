"""What stored rows of `overlap` say: gains beside the renewal model, the best K of either way, and forecasts."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from benchmarks.overlap_pages import Comparison, Figures, summary, table, text
from llama_ssp.planning.acceptance.rounds import overlapped_tokens, tokens_per_round

NUM_ROUNDS, NUM_EXAMINED = 1000, 1_000_000
STEP_S, FORWARD_S = 0.004, 0.016


def figures(number: int, acceptance: float, *, overlaps: bool, waits: bool = False, **changes: Any) -> Figures:  # noqa: ANN401
    """A candidate that takes what the model says: a round of the longer piece, with what may precede it, or of both."""
    draft_s, refill_s = number * STEP_S, (number - 1) * STEP_S
    round_s, tokens = draft_s + FORWARD_S, tokens_per_round(acceptance, number)
    if overlaps:
        round_s, tokens = max(draft_s, FORWARD_S), overlapped_tokens(acceptance, number)
    if waits:
        round_s, tokens = round_s + (1 - acceptance**number) * refill_s, tokens_per_round(acceptance, number - 1)
    known: dict[str, Any] = {
        "overlaps": overlaps, "num_draft_tokens": number, "waits": waits, "num_rounds": NUM_ROUNDS,
        "num_tokens": round(NUM_ROUNDS * tokens), "num_examined": NUM_EXAMINED,
        "num_accepted": round(NUM_EXAMINED * acceptance), "draft_s": draft_s, "verify_s": FORWARD_S,
        "round_s": round_s, "idle_shares": [0.05, 0.1],
    }  # fmt: skip
    return Figures(**known | changes)


def comparison(acceptance: float, **changes: Any) -> Comparison:  # noqa: ANN401
    apart = [
        figures(number, acceptance, overlaps=overlaps, waits=overlaps and number == 2, **changes)
        for overlaps in (True, False)
        for number in (2, 4)
    ]
    together = [figures(number, acceptance, overlaps=False, round_s=0.02) for number in (2, 4)]
    return Comparison(
        agreement=acceptance, quantization="none", width=512, target_layers=20, draft_layers=5, apart=apart,
        together=together,
    )  # fmt: skip


@pytest.mark.parametrize("acceptance", [0.5, 0.9])
def test_rounds_as_the_model_has_them_gain_what_the_model_says(acceptance: float) -> None:
    found = comparison(acceptance)
    assert found.acceptance == pytest.approx(acceptance)
    for number in found.lengths:
        assert found.gain(number) == pytest.approx(found.modelled_gain(number), rel=0.01)
    assert found.at(2, overlaps=True).waits


def test_the_best_of_either_way_has_its_own_k() -> None:
    found = comparison(0.9)
    slow = [figures(4, 0.9, overlaps=False, round_s=0.2) if each == found.apart[3] else each for each in found.apart]
    mixed = Comparison.of(found.row() | {"apart": [vars(each) for each in slow]})
    assert (mixed.best_of(True).num_draft_tokens, mixed.best_of(False).num_draft_tokens) == (4, 2)
    ratio = mixed.at(2, overlaps=False).ms_per_token / mixed.at(4, overlaps=True).ms_per_token
    assert mixed.best_gain == pytest.approx(ratio)
    assert f"{ratio:.2f}x" in summary(mixed)


def test_the_page_has_a_line_for_each_pair_from_its_newest_row_by_acceptance() -> None:
    made_by = {"processor": "abacus"}
    old = comparison(0.9, forecast_ms=1.0)
    rows = [made_by | each.row() for each in (old, comparison(0.9, forecast_ms=5.0), comparison(0.5, forecast_ms=10.0))]
    said = text(rows)
    assert "an abacus" in said
    lines = [line for line in said.splitlines() if line.startswith("| 0.")]
    assert [line[2:6] for line in lines] == ["0.50", "0.90"] * 3, "gains, gains by K, forecasts"
    expected = 5.0 / old.at(4, overlaps=True).ms_per_token
    assert lines[-1].endswith(f"| {expected:.2f} |")
    without = text([made_by | comparison(0.9).row()])
    assert "forecast" not in without


def test_a_cell_of_a_k_is_from_the_row_with_most_tokens_there() -> None:
    short, long = comparison(0.9), comparison(0.9)
    alone = [figures(4, 0.9, overlaps=overlaps, round_s=0.02) for overlaps in (True, False)]
    longer = [Figures(**vars(each) | {"num_tokens": 9 * each.num_tokens, "num_rounds": 9000}) for each in alone]
    long = Comparison.of(long.row() | {"apart": [vars(each) for each in longer], "together": []})
    said = text([{"processor": "abacus"} | each.row() for each in (long, short)])
    whole, by_length = [line for line in said.splitlines() if line.startswith("| 0.")]
    assert f"| {short.gain(4):.2f}x | {short.modelled_gain(4):.2f}x |" in whole, "all K of one row took turns"
    assert f"{short.gain(2):.2f}x" in by_length
    assert by_length.endswith(f"| {long.gain(4):.2f}x ({long.modelled_gain(4):.2f}x) |")
    assert f"{long.gain(4):.2f}x" != f"{short.gain(4):.2f}x"


def test_the_table_has_a_line_for_each_k() -> None:
    console = Console(width=200, file=StringIO())
    with console.capture() as capture:
        console.print(table(comparison(0.9)))
    shown = capture.get()
    assert shown.count("yes") == 1
    assert f"{comparison(0.9).gain(4):.2f}x" in shown
