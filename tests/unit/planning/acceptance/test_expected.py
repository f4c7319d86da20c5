"""What a plan makes of an acceptance: ranges, and no K on a guess."""

import math
from dataclasses import replace

import pytest

from llama_ssp.config.machines import hardware
from llama_ssp.planning.acceptance.expected import expected, knows_best_k, ranges, token_range
from llama_ssp.planning.acceptance.pair import Acceptance, DraftedPair
from llama_ssp.planning.acceptance.rounds import tokens_per_round
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.time_error import TimeError
from llama_ssp.planning.timing import timing
from tests.helpers.planning import make_job

A100 = hardware.load("8xa100_80gb")
ROUNDS_S = [1.0 + 0.1 * number for number in range(1, 17)]
GUESS = Acceptance(probability=0.7, low=0.5, high=0.9, source="fitted", is_forecast=True)


def test_ranges_are_those_of_either_end_of_the_acceptance() -> None:
    found = ranges(GUESS, ROUNDS_S, chosen=4)
    assert found
    assert found.tokens_per_round == (tokens_per_round(0.5, 4), tokens_per_round(0.9, 4))
    ends_s = token_range(GUESS, 1.4, None, chosen=4)
    assert ends_s == pytest.approx((1.4 / tokens_per_round(0.9, 4), 1.4 / tokens_per_round(0.5, 4)))
    low, high = found.best_num_draft_tokens
    assert low < high


def test_an_acceptance_that_the_user_gave_has_no_range() -> None:
    assert ranges(Acceptance(probability=0.7, source="given"), ROUNDS_S, chosen=4) is None
    assert timing(make_job("13B", "7B", acceptance=0.7), A100).ranges is None


def test_errors_of_acceptance_and_of_times_are_joined_as_independent() -> None:
    error, tokens = TimeError(mean=0.1, spread=0.15, quantile=2.0), {0.5: math.exp(-0.4), 0.7: 1.0, 0.9: math.exp(0.4)}
    ends_s = token_range(GUESS, 2.0, error, chosen=4, gain=lambda acceptance, _number: tokens[acceptance])
    assert ends_s == pytest.approx((2 * math.exp(0.1 - 0.5), 2 * math.exp(0.1 + 0.5)))


def test_a_given_acceptance_leaves_the_error_of_times() -> None:
    given, error = Acceptance(probability=0.7, source="given"), TimeError(mean=0.1, spread=0.15, quantile=2.0)
    middle_s = 2.0 / tokens_per_round(0.7, 4)
    assert token_range(given, 2.0, error, chosen=4) == pytest.approx(error.ends(middle_s))
    assert token_range(given, 2.0, None, chosen=4) is None
    timed = timing(make_job("13B", "7B", acceptance=0.7), A100)
    for mode in ("plain", "speculative"):
        low, high = getattr(timed, f"{mode}_range_s")
        assert low < getattr(timed, f"{mode}_s") < high


def test_a_run_that_goes_on_without_drafts_has_the_range_of_plain_decoding() -> None:
    job = make_job("13B", "7B", acceptance=0.1)
    timed = timing(replace(job, adapts=True), A100)
    assert timed.speculative_s == timed.plain_s
    assert timed.speculative_range_s == timed.plain_range_s


def test_a_k_is_known_where_the_pair_is_measured_or_the_best_one_hardly_depends_on_it() -> None:
    wide = ranges(GUESS, ROUNDS_S, chosen=4)
    assert not knows_best_k(GUESS, wide)
    assert knows_best_k(replace(GUESS, is_forecast=False), wide)
    close = replace(GUESS, low=0.69, high=0.71)
    assert knows_best_k(close, ranges(close, ROUNDS_S, chosen=4))


def test_a_drafter_that_nobody_knows_has_a_wide_range_instead_of_a_figure() -> None:
    found = expected(DraftedPair(target="30B", draft="mine", has_model=False))
    assert found.is_forecast
    assert found.ends[1] - found.ends[0] > 0.5


def test_the_smallest_draft_does_not_get_the_acceptance_of_a_large_one() -> None:
    large, small = (
        timing(make_job("llama3_70B", draft, acceptance=None), A100).acceptance for draft in ("llama3_8B", "llama3_1B")
    )
    assert large
    assert small
    assert small.probability < large.probability < 0.85
    assert small.ends[0] < 0.7


def test_a_plan_of_a_pair_that_nobody_measured_shows_ranges_and_what_would_narrow_them() -> None:
    job = make_job("llama3_70B", "llama3_8B", num_ranks=8, acceptance=None)
    plan = make_plan(job, A100)
    time = document(plan)["time"]
    for name in ("acceptance", "tokens_per_round", "speculative_ms_per_token", "best_num_draft_tokens"):
        low, high = time[f"{name}_range"]
        assert low <= time[name] <= high, name
    assert time["acceptance_is_forecast"]
    assert "llama-ssp run task=latency task.store=true model=llama3_70B draft=llama3_8B" in "\n".join(plan.notes)


def test_no_k_is_recommended_on_a_guess() -> None:
    job = make_job("llama3_70B", "llama3_1B", num_ranks=8, acceptance=None, num_draft_tokens=1)
    plan = make_plan(job, A100)
    low, high = document(plan)["time"]["best_num_draft_tokens_range"]
    assert high - low > 2
    assert not [warning for warning in plan.warnings if "speculation.num_draft_tokens=" in warning]
    assert any(note.startswith(f"the best K is {low} to {high}") for note in plan.notes)
    given = make_plan(replace(job, acceptance=0.8), A100)
    assert any("speculation.num_draft_tokens=" in warning for warning in given.warnings)


def test_a_published_pair_keeps_its_figure_and_its_source() -> None:
    plan = make_plan(make_job("30B", "7B", num_ranks=8, acceptance=None), A100)
    time = document(plan)["time"]
    assert (time["acceptance"], time["acceptance_is_forecast"]) == (0.80, False)
    assert "330 -> 180 ms/token" in time["acceptance_source"]
    assert not [note for note in plan.notes if "to narrow" in note]
