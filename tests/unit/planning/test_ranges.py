"""80 % ranges of forecasts: fitted to published rows by source, wide where little was measured, never below physics."""

from typing import Any

import pytest

from benchmarks import published
from benchmarks.published_rows import ROWS
from llama_ssp.machines import hardware
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.timing import FAR, NEAR
from tests.helpers.planning import make_spec, times_of

A100, B200 = hardware.load("8xa100_80gb"), hardware.load("8xb200")


def test_plans_have_the_ranges_that_published_rows_give() -> None:
    rows = published.judged()
    near = published.errors_of(row for row in rows if published.is_near(row))
    for errors, ends in (near, NEAR), (published.errors_of(rows), FAR):
        assert published.fitted_range(errors) == pytest.approx(ends, abs=0.015)


def test_seven_to_nine_of_ten_published_rows_are_inside_the_range_by_other_sources() -> None:
    rows = published.judged()
    assert 0.7 <= sum(map(published.is_held, rows)) / len(rows) <= 0.9
    of_source: dict[tuple[str, bool], set[tuple[float, float]]] = {}
    for row in rows:
        of_source.setdefault((row.source.name, published.is_near(row)), set()).add(published.range_by_others(row))
    assert {len(ranges) for ranges in of_source.values()} == {1}, "a row is in no range of its own source"


def test_a_row_that_gives_a_constant_is_fitted_and_its_source_makes_no_forecasts() -> None:
    kinds = {
        kind: {row.source.name for row in ROWS if published.kind_of(row) == kind} for kind in ("fitted", "forecast")
    }
    assert not kinds["fitted"] & kinds["forecast"]
    assert kinds["fitted"] == {"gpt-fast", "TensorRT-LLM 0.6"}
    assert all(row.source.page and row.source.left_out for row in ROWS)


@pytest.mark.parametrize(
    ("asked", "factors", "unmeasured"),
    [
        (("7B", "none", 1, "8xa100_80gb"), NEAR, ""),
        (("13B", "none", 16, "1xh200"), NEAR, ""),
        (("7B", "none", 17, "8xa100_80gb"), FAR, ""),
        (("smollm2_135M", "none", 1, "8xa100_80gb"), FAR, ""),  # a step of 1 ms
        (("7B", "int4_weight_only", 1, "8xa100_80gb"), FAR, ""),
        (("65B", "none", 1, "8xb200"), FAR, "B200"),
        (("65B", "none", 1, "8xmi300x"), FAR, "MI300X"),
        (("7B", "nf4", 1, "8xa100_80gb"), FAR, "nf4"),
        (("7B", "int4_weight_only", 256, "8xa100_80gb"), FAR, "256 rows of int4_weight_only"),
    ],
)
def test_ranges_are_wide_where_little_was_measured_and_the_plan_says_what_nobody_has(
    asked: tuple[str, str, int, str], factors: tuple[float, float], unmeasured: str
) -> None:
    target, quantization, batch_size, machine = asked
    spec = make_spec(target, batch_size=batch_size, of_target={"quantization": quantization})
    plan = make_plan(spec, hardware.load(machine))
    timed: Any = plan.timing
    assert timed.plain_s_range[1] == pytest.approx(factors[1] * timed.plain_s)
    assert timed.plain_s_range[0] == pytest.approx(max(factors[0], timed.limit_share) * timed.plain_s)
    assert timed.prefill_s_range == pytest.approx([end * timed.prefill_s for end in FAR])
    said = [note for note in plan.notes if note.startswith("docs/benchmarks/published.md has no speed of ")]
    assert [unmeasured in note for note in said] == ([True] if unmeasured else [])


@pytest.mark.parametrize("machine", ["1xl4", "1xh100", "8xa100_80gb", "8xb200", "8xmi300x", "mi250"])
@pytest.mark.parametrize("quantization", ["none", "int8_weight_only", "int4_weight_only"])
def test_no_range_begins_below_what_the_data_sheet_allows(machine: str, quantization: str) -> None:
    for target, prompt_tokens in ("llama3_1B", 128), ("llama3_8B", 100000), ("llama3_70B", 4000):
        spec = make_spec(target, prompt_tokens=prompt_tokens, of_target={"quantization": quantization})
        timed = times_of(spec, hardware.load(machine))
        assert timed.plain_s_range[0] >= 0.999 * timed.limit_share * timed.plain_s


def test_the_range_of_a_speculative_time_has_that_of_an_unknown_pair() -> None:
    known = times_of(make_spec("65B", "7B", num_ranks=8, acceptance=0.7), A100)
    unknown = times_of(make_spec("65B", "tinyllama_1B", num_ranks=8, acceptance=None), A100)
    assert known.speculative_s_range == pytest.approx([end * known.speculative_s for end in NEAR])
    low, high = (end / unknown.speculative_s for end in unknown.speculative_s_range)
    fewest, most = unknown.tokens_per_round_range
    slower, faster = unknown.tokens_per_round / fewest, unknown.tokens_per_round / most
    assert faster * NEAR[0] < low < min(faster, NEAR[0])
    assert max(slower, NEAR[1]) < high < slower * NEAR[1]


def test_calibrated_machines_and_cpus_have_no_ranges() -> None:
    laptop = hardware.load("laptop_cpu")
    spec = make_spec("smollm2_135M", device="cpu")
    time = document(make_plan(spec, laptop))["time"]
    assert [time[f"{name}_range"] for name in ("plain_ms_per_token", "first_token_ms")] == [None, None]
