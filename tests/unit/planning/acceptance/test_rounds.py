"""Tokens per round by the acceptance, and back."""

import pytest

from llama_ssp.planning.acceptance.rounds import implied_acceptance, tokens_per_round


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.99])
def test_tokens_per_round_is_the_closed_form_of_leviathan(acceptance: float) -> None:
    assert tokens_per_round(acceptance, 4) == pytest.approx((1 - acceptance**5) / (1 - acceptance))


def test_a_round_yields_between_one_token_and_k_plus_one() -> None:
    assert tokens_per_round(0.0, 7) == 1
    assert tokens_per_round(1.0, 7) == 8


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.84])
def test_the_implied_acceptance_inverts_tokens_per_round(acceptance: float) -> None:
    assert implied_acceptance(tokens_per_round(acceptance, 6), 6) == pytest.approx(acceptance, abs=1e-9)
