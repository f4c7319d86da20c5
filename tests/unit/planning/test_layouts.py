"""Every layout of a machine's ranks: which there are, and that the settings of one lead back to it."""

from dataclasses import replace

import pytest

from llama_ssp.planning.search import block_sizes, layouts, on_block, placement_settings, same_kind
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.layout import lay_out_replica
from llama_ssp.settings.schema import DraftLayout, DraftPlacement, PlacementConfig, WholeParts
from tests.helpers.planning import make_job

PAIR, ALONE = make_job("13B", "7B"), make_job("13B")


def test_ranks_are_divided_into_equal_blocks() -> None:
    assert block_sizes(16) == [16, 8, 4, 2, 1]
    assert block_sizes(6) == [6, 3, 2, 1]


def test_all_ranks_are_used_by_replicas_of_every_size() -> None:
    found = [(one.num_replicas, one.target_ranks) for one in layouts(ALONE, num_ranks=4, divides=True, thorough=False)]
    assert found == [(1, (0, 1, 2, 3)), (2, (0, 1)), (4, (0,))]


def test_replicas_that_were_asked_for_are_kept() -> None:
    job = replace(ALONE, num_replicas=2)
    assert [one.target_ranks for one in layouts(job, num_ranks=4, divides=False, thorough=False)] == [(0, 1)]
    assert [one.num_replicas for one in layouts(job, num_ranks=4, divides=True, thorough=False)] == [2, 4]


def test_a_draft_has_every_place_of_a_block() -> None:
    kinds = [(one.draft_kind, one.target_ranks, one.draft_ranks) for one in on_block(PAIR, 2)]
    assert kinds == [
        (DraftLayout.one_rank, (0, 1), (0,)),
        (DraftLayout.sharded, (0, 1), (0, 1)),
        (DraftLayout.own_gpu, (0,), (1,)),
    ]
    rows = replace(PAIR, batch_size=2)
    assert DraftLayout.replicated in {one.draft_kind for one in on_block(rows, 2)}
    assert {one.draft_kind for one in on_block(rows, 1)} == {DraftLayout.one_rank}


def test_a_thorough_enumeration_also_has_the_numbers_between() -> None:
    sizes = {(one.draft_kind, len(one.draft_ranks)) for one in on_block(PAIR, 4, thorough=True)}
    assert {(DraftLayout.sharded, size) for size in (2, 3, 4)} < sizes
    assert {(DraftLayout.own_gpu, size) for size in (1, 2, 3)} < sizes


def _resolved(settings: list[str], *, num_ranks: int, has_draft: bool) -> PlanSpec:
    given = dict(setting.split("=", 1) for setting in settings)
    kind = DraftLayout[given.get("placement.draft.kind", "one_rank")]
    size = given.get("placement.draft.tp_size")
    whole = WholeParts[given.get("placement.draft.whole", DraftPlacement().whole.name)]
    placement = PlacementConfig(
        draft=DraftPlacement(kind=kind, tp_size=int(size) if size else None, whole=whole),
        num_replicas=int(given.get("placement.num_replicas", 1)),
    )
    laid_out = lay_out_replica(placement, world_size=num_ranks, has_draft=has_draft)
    job = PAIR if has_draft else ALONE
    return replace(
        job, batch_size=2, num_replicas=placement.num_replicas, target_ranks=laid_out.target_ranks,
        draft_ranks=laid_out.draft_ranks, draft_kind=kind, draft_whole=whole,
    )  # fmt: skip


@pytest.mark.parametrize("job", [PAIR, ALONE])
def test_the_settings_of_a_layout_lead_back_to_it(job: PlanSpec) -> None:
    for one in layouts(replace(job, batch_size=2), num_ranks=8, divides=True, thorough=True):
        assert _resolved(placement_settings(one), num_ranks=8, has_draft=job.draft is not None) == one


def test_a_block_of_another_size_keeps_the_kind_of_the_draft() -> None:
    sharded = replace(make_job("13B", "7B", num_ranks=4), draft_kind=DraftLayout.sharded)
    smaller = same_kind(sharded, 2)
    assert smaller
    assert (smaller.draft_kind, smaller.target_ranks, smaller.draft_ranks) == (DraftLayout.sharded, (0, 1), (0, 1))
    alone = same_kind(sharded, 1)
    assert alone
    assert (alone.draft_kind, alone.target_ranks) == (DraftLayout.one_rank, (0,))
