"""The ranking of all choices."""

from dataclasses import replace
from functools import cache

import pytest

from llama_ssp.config import catalogue, hardware
from llama_ssp.config.schema import DraftLayout
from llama_ssp.errors import PlacementError
from llama_ssp.planning.choices.search import Choice, search
from llama_ssp.planning.memory import memory
from llama_ssp.planning.timing import timing
from tests.helpers.lanes import heavy
from tests.helpers.planning import make_job, small_model

A10G = hardware.load("g5_12xlarge")


@cache
def choices() -> list[Choice]:
    """What the planner suggests for a large model on four small GPUs."""
    return search(make_job("65B", "7B", num_ranks=4), A10G)


def choice(found: list[Choice], target: str, draft: str | None, kind: str | None) -> Choice:
    """That of one unquantized pair and placement."""
    wanted = (target, "fp16", draft, kind)
    return next(one for one in found if (one.target, one.quantization, one.draft, one.draft_kind) == wanted)


def test_choices_are_ranked_by_speed_and_what_does_not_fit_comes_last_with_the_reason() -> None:
    times = [choice.ms_per_token for choice in choices() if choice.ms_per_token is not None]
    assert times == sorted(times)
    misfits = choices()[len(times) :]
    assert misfits
    assert all(choice.ms_per_token is None and choice.reason for choice in misfits)


def test_every_size_precision_and_placement_is_tried() -> None:
    assert {choice.target for choice in choices()} == {"7B", "13B", "30B", "65B"}
    quantizations = {"fp16", "int8", "nf4", "int8_weight_only", "int4_weight_only"}
    assert {choice.quantization for choice in choices()} == quantizations
    assert {choice.draft_kind for choice in choices()} == {None, "sharded", "one_rank", "own_gpu"}


@pytest.mark.parametrize(
    ("kind", "target_ranks", "draft_ranks"),
    [
        (DraftLayout.one_rank, (0, 1, 2, 3), (0,)),
        (DraftLayout.sharded, (0, 1, 2, 3), (0, 1, 2, 3)),
        (DraftLayout.own_gpu, (0, 1, 2), (3,)),
    ],
)
def test_a_choice_has_the_time_of_its_placement_with_the_best_k(
    kind: DraftLayout, target_ranks: tuple[int, ...], draft_ranks: tuple[int, ...]
) -> None:
    job = replace(make_job("13B", "7B"), target_ranks=target_ranks, draft_ranks=draft_ranks, draft_kind=kind)
    timed, found = timing(job, A10G), choice(choices(), "13B", "7B", kind.name)
    least_s = min(timed.by_num_draft_tokens)
    assert found.ms_per_token == pytest.approx(1e3 * least_s)
    assert found.speedup == pytest.approx(timed.plain_s / least_s)
    assert found.num_draft_tokens == timed.best_num_draft_tokens
    assert f"speculation.num_draft_tokens={timed.best_num_draft_tokens}" in found.settings


@pytest.mark.parametrize("num_copies", [1, heavy(2)])
def test_a_choice_without_a_draft_has_the_time_of_plain_decoding_on_the_ranks_of_a_copy(num_copies: int) -> None:
    job = replace(make_job("13B", num_ranks=4 // num_copies), num_replicas=num_copies)
    found = choice(search(job, A10G), "13B", None, None)
    assert found.ms_per_token == pytest.approx(1e3 * timing(job, A10G).plain_s)
    assert (found.speedup, found.num_draft_tokens) == (1.0, 0)


def test_a_choice_has_the_best_k_of_those_that_fit() -> None:
    """Random numbers, logits and graphs grow with K."""
    job = make_job("7B", "llama2_1B" if "llama2_1B" in catalogue.names() else "tinyllama_1B", num_draft_tokens=1)
    needed = {k: memory(replace(job, num_draft_tokens=k), A10G)[0].needed_bytes for k in range(1, 17)}
    best = timing(job, A10G).best_num_draft_tokens
    assert best in range(3, 17)
    machine = replace(A10G, num_gpus=1, memory_bytes=needed[2])
    found = choice(search(job, machine), "7B", job.draft.name if job.draft else None, "one_rank")
    assert (found.num_draft_tokens, found.needed_bytes) == (2, needed[2])


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    plain = next(c for c in choices() if (c.target, c.quantization, c.draft) == ("65B", "fp16", None))
    assert plain.reason == "rank 0 needs 31.8 of 22.2 GiB"


def test_replicated_drafts_are_tried_where_there_are_rows_to_share() -> None:
    choices = search(make_job("13B", "7B", num_ranks=4, batch_size=4), A10G)
    assert "replicated" in {choice.draft_kind for choice in choices}


def test_one_gpu_knows_one_placement() -> None:
    choices = search(make_job("13B", "7B"), replace(A10G, num_gpus=1))
    assert {choice.draft_kind for choice in choices} == {None, "one_rank"}


def test_models_beyond_the_catalogue_have_no_series_to_rank() -> None:
    with pytest.raises(PlacementError, match="small"):
        search(make_job(small_model()), A10G)
