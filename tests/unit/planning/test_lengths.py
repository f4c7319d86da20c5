"""No comparison recommends a K on a guess."""

from dataclasses import replace

import pytest

from llama_ssp.machines import hardware
from llama_ssp.planning.search import by_length, length_setting, search
from llama_ssp.planning.timing import timing
from tests.helpers.planning import make_job

A100 = hardware.load("8xa100_80gb")


def test_a_known_pair_is_tried_with_every_k_the_fastest_first() -> None:
    job = make_job("30B", "7B", num_ranks=8, acceptance=None)
    timed = timing(job, A100)
    ways = list(by_length(job, timed))
    assert sorted(each.num_draft_tokens for _, each in ways) == [*range(1, 17)]
    assert [token_s for token_s, _ in ways] == sorted(timed.by_num_draft_tokens)
    assert length_setting(ways[0][1]) == f"speculation.num_draft_tokens={timed.best_num_draft_tokens}"


def test_a_pair_that_nobody_measured_chooses_k_while_it_runs() -> None:
    job = make_job("65B", "tinyllama_1B", num_ranks=8, acceptance=None)
    timed = timing(job, A100)
    ((token_s, adaptive),) = by_length(job, timed)
    assert length_setting(adaptive) == "speculation.num_draft_tokens=auto"
    assert token_s == pytest.approx(timing(adaptive, A100).speculative_s, rel=1e-3)
    assert not any(by_length(replace(job, draft=None), timing(replace(job, draft=None), A100)))


@pytest.mark.heavy
def test_a_search_ranks_drafts_by_the_median_of_what_is_expected_of_them() -> None:
    machine = replace(A100, num_gpus=2)
    found = search(make_job("30B", "7B", num_ranks=2, acceptance=None), machine)
    drafted = [each for each in found if each["draft"] and each["reason"] is None and each["target"] == "30B"]
    assert not any(each["adapts"] for each in drafted if each["draft"] == "7B")
    guessed = next(each for each in drafted if each["draft"] == "tinyllama_1B" and each["quantization"] == "fp16")
    assert guessed["adapts"]
    assert "speculation.num_draft_tokens=auto" in guessed["settings"]
    assert guessed["speedup"]
    assert guessed["speedup"] < 3
