"""The ranking of all choices."""

from dataclasses import replace

import pytest

from llama_ssp.config import hardware
from llama_ssp.errors import PlacementError
from llama_ssp.planning.search import search
from tests.helpers.planning import make_job, small_model

A10G = hardware.load("g5_12xlarge")
CHOICES = search(make_job("65B", "7B", num_ranks=4), A10G)


def test_choices_are_ranked_by_speed_and_what_does_not_fit_comes_last_with_the_reason() -> None:
    times = [choice.ms_per_token for choice in CHOICES if choice.ms_per_token is not None]
    assert times == sorted(times)
    misfits = CHOICES[len(times) :]
    assert misfits
    assert all(choice.ms_per_token is None and choice.reason for choice in misfits)


def test_every_size_precision_and_placement_is_tried() -> None:
    assert {choice.target for choice in CHOICES} == {"7B", "13B", "30B", "65B"}
    assert {choice.quantization for choice in CHOICES} == {"fp16", "int8", "nf4", "int8_weight_only"}
    assert {choice.draft_kind for choice in CHOICES} == {None, "sharded", "one_rank", "own_gpu"}


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    plain = next(c for c in CHOICES if (c.target, c.quantization, c.draft) == ("65B", "fp16", None))
    assert plain.reason == "rank 0 needs 31.7 of 22.2 GiB"


def test_replicated_drafts_are_tried_where_there_are_rows_to_share() -> None:
    choices = search(make_job("13B", "7B", num_ranks=4, batch_size=4), A10G)
    assert "replicated" in {choice.draft_kind for choice in choices}


def test_one_gpu_knows_one_placement() -> None:
    choices = search(make_job("13B", "7B"), replace(A10G, num_gpus=1))
    assert {choice.draft_kind for choice in choices} == {None, "one_rank"}


def test_models_beyond_the_catalogue_have_no_series_to_rank() -> None:
    with pytest.raises(PlacementError, match="small"):
        search(make_job(small_model()), A10G)
