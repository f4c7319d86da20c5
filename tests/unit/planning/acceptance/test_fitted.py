"""The forecast of a pair that nobody has measured: which way it goes, and how wide it is."""

from dataclasses import replace

import pytest

from llama_ssp.config.schema import TextKind
from llama_ssp.planning.acceptance.fitted import around, forecast, predicted, shipped_fit
from llama_ssp.planning.acceptance.pair import DraftedPair

PAIR = DraftedPair(target="a", draft="b", size_ratio=10.0, family="llama", temperature=0.5, text=TextKind.prose)


def width(pair: DraftedPair) -> float:
    low, high = forecast(pair).ends
    return high - low


def test_a_range_holds_its_median_and_stays_a_probability() -> None:
    for ratio in (1.1, 10.0, 1000.0):
        low, middle, high = predicted(replace(PAIR, size_ratio=ratio), shipped_fit())
        assert 0 < low < middle < high < 1


@pytest.mark.parametrize(
    "harder",
    [{"size_ratio": 60.0}, {"temperature": 1.0}, {"own_tokenizer": True}, {"rule": "coupled"}],
    ids=lambda changed: next(iter(changed)),
)
def test_smaller_drafts_higher_temperatures_and_other_tokenizers_are_accepted_less(harder: dict[str, object]) -> None:
    other = forecast(replace(PAIR, **harder))  # type: ignore[arg-type]
    assert other.probability < forecast(PAIR).probability


def test_code_is_accepted_more_than_prose_and_a_text_that_is_not_known_lies_between() -> None:
    prose, unknown, code = (
        forecast(replace(PAIR, text=text)).probability for text in (TextKind.prose, TextKind.any, TextKind.code)
    )
    assert prose < unknown < code


@pytest.mark.parametrize("unknown", [{"size_ratio": None}, {"temperature": None}, {"own_tokenizer": True}])
def test_what_is_not_known_widens_the_range(unknown: dict[str, object]) -> None:
    middle = replace(PAIR, size_ratio=8.0, temperature=0.5)
    assert width(replace(middle, **unknown)) > width(middle)  # type: ignore[arg-type]


def test_a_pair_beyond_all_points_has_a_wider_range_and_says_so() -> None:
    far = replace(PAIR, size_ratio=200.0)
    assert width(far) > width(PAIR)
    assert "the target is 200 times as large as the draft, in those pairs" in forecast(far).source
    assert "times as large" not in forecast(PAIR).source


def test_a_forecast_says_what_it_rests_on() -> None:
    found = forecast(PAIR)
    fit = shipped_fit()
    assert found.is_forecast
    assert f"fitted to {fit.num_points} points of {len(fit.pairs)} pairs, nearest 65B with 7B (0.79)" in found.source


def test_rules_coincide_at_temperature_0() -> None:
    greedy = replace(PAIR, temperature=0.0)
    assert len({forecast(replace(greedy, rule=rule)) for rule in ("speculative", "block", "coupled", "greedy")}) == 1


def test_a_figure_of_the_pair_is_better_known_than_a_forecast() -> None:
    low, high = around(forecast(PAIR).probability)
    assert high - low < 0.8 * width(PAIR)
