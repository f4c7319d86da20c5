"""The fastest placement that fits."""

from dataclasses import replace

import pytest

from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import fits
from llama_ssp.planning.search import choose_placement
from llama_ssp.planning.timing import timing
from llama_ssp.settings.schema import DraftLayout, WholeParts
from llama_ssp.words import rounded
from tests.helpers.planning import make_job, small_model

A100, A10G = hardware.load("8xa100_80gb"), hardware.load("g5_12xlarge")


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("kind", DraftLayout)
def test_no_other_placement_is_faster(kind: DraftLayout, batch_size: int) -> None:
    job = make_job("13B", "7B", num_ranks=8, batch_size=batch_size)
    chosen, sentence = choose_placement(job, A100, num_ranks=8)
    targets = job.target_ranks[:-1] if kind is DraftLayout.own_gpu else job.target_ranks
    drafts = {DraftLayout.one_rank: (0,), DraftLayout.own_gpu: (7,)}.get(kind, targets)
    other = replace(job, draft_kind=kind, target_ranks=targets, draft_ranks=drafts)
    least, rival = timing(chosen, A100).speculative_run_s, timing(other, A100).speculative_run_s
    assert least
    assert rival
    assert least <= rival
    assert f"{rounded(1e3 * least)} ms per token" in sentence


@pytest.mark.parametrize("latency_s", [1e-6, 15e-6])
def test_attention_stays_whole_where_a_collective_takes_longer_than_reading_it(latency_s: float) -> None:
    machine = replace(A100, link=replace(A100.link, latency_s=latency_s))
    job = make_job("30B", "tinyllama_1B", num_ranks=8)
    sharded = replace(job, draft_kind=DraftLayout.sharded, draft_ranks=job.target_ranks)
    step_s = {whole: timing(replace(sharded, draft_whole=whole), machine).draft_forward_s for whole in WholeParts}
    reads_s = 22 * 2 * (2 * 2048 * 2048 + 2 * 2048 * 256) * 7 / 8 / 1.7e12
    saved_s = 22 * latency_s
    saves = (step_s[WholeParts.embedding] or 0) > (step_s[WholeParts.attention] or 0)
    assert saves == (saved_s > reads_s)
    assert (step_s[WholeParts.none] or 0) - (step_s[WholeParts.embedding] or 0) == pytest.approx(latency_s, rel=0.05)
    chosen, sentence = choose_placement(job, machine, num_ranks=8)
    assert chosen.draft_whole is (WholeParts.attention if saves else WholeParts.embedding)
    assert ("attention whole" in sentence) == saves


def test_what_does_not_fit_is_not_chosen() -> None:
    job = make_job("30B", "7B", num_ranks=4)
    assert not fits(job, A10G)
    chosen = choose_placement(job, A10G, num_ranks=4)[0]
    assert fits(chosen, A10G)


def test_where_nothing_fits_the_plan_says_so() -> None:
    assert "none fits" in choose_placement(make_job("65B", "7B", num_ranks=4), A10G, num_ranks=4)[1]


def test_replicas_on_fewer_ranks_are_chosen_where_they_are_faster_and_where_that_is_allowed() -> None:
    two_nodes = replace(hardware.load("8xh100"), num_nodes=2)
    job = make_job("llama3_70B", num_ranks=16)
    chosen, sentence = choose_placement(job, two_nodes, num_ranks=16, divides=True)
    assert (chosen.num_replicas, chosen.target_ranks) == (2, tuple(range(8)))
    assert "2 replicas, each with the target on ranks 0 1 2 3 4 5 6 7" in sentence
    kept = choose_placement(job, two_nodes, num_ranks=16)[0]
    assert (kept.num_replicas, kept.target_ranks) == (1, tuple(range(16)))


def test_what_cannot_be_laid_out_at_all_is_refused() -> None:
    with pytest.raises(PlacementError, match="attention heads"):
        choose_placement(make_job(small_model(num_attention_heads=4)), A100, num_ranks=8)
