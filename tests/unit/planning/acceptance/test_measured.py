"""The acceptance of a run, and how far other prompts may be from it."""

import random

import pytest

from llama_ssp.planning.acceptance.measured import accepted_share

Rounds = list[tuple[int, int]]


def rounds(rng: random.Random, *, acceptance: float, num_rounds: int, num_draft_tokens: int = 4) -> Rounds:
    """Rounds of a prompt: accepted tokens, and those that were examined."""
    found = []
    for _ in range(num_rounds):
        accepted = 0
        while accepted < num_draft_tokens and rng.random() < acceptance:
            accepted += 1
        found.append((accepted, min(accepted + 1, num_draft_tokens)))
    return found


def test_it_is_accepted_over_examined_tokens() -> None:
    found = accepted_share([[(3, 4), (0, 1)], [], [(4, 4)]])
    assert found
    assert found.probability == pytest.approx(7 / 9)
    assert (found.num_examined, found.num_prompts) == (9, 2)
    assert accepted_share([[], []]) is None


def test_all_accepted_is_no_certainty() -> None:
    found = accepted_share([[(4, 4)], [(4, 4)]])
    assert found
    assert found.low < found.probability == found.high == 1.0


def test_four_ranges_of_five_hold_the_acceptance_of_all_prompts() -> None:
    """Of 400 runs of 15 prompts that differ, 320 should; 20 more or less are three standard deviations by luck."""
    rng, inside = random.Random(3), 0
    for _ in range(400):
        prompts = [rounds(rng, acceptance=rng.choice((0.6, 0.7, 0.8)), num_rounds=20) for _ in range(15)]
        found = accepted_share(prompts)
        assert found
        # Prompts with longer runs have more tokens examined: 5.4403 / 7.6613 over very many prompts.
        inside += found.low <= 0.7101 <= found.high
    assert 290 <= inside <= 350
