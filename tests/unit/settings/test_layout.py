"""Who holds what, and whose word counts."""

import pytest

from llama_ssp.settings.layout import Layout, idle, lay_out, problems_of
from llama_ssp.settings.schema import DraftLayout, DraftPlacement, PlacementConfig, TargetPlacement

ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout


def _layout(target: list[int], draft: list[int], kind: DraftLayout) -> Layout:
    return Layout(target_ranks=tuple(target), draft_ranks=tuple(draft), draft_kind=kind)


@pytest.mark.parametrize(
    ("target", "draft", "kind", "draft_source_rank", "verify_rank"),
    [
        ([0, 1], [0], ONE_RANK, 0, 0),
        ([0, 1], [1], ONE_RANK, 1, 1),
        ([0, 1, 2], [3], ONE_RANK, 3, 0),
        ([1, 2], [0, 1], SHARDED, 1, 1),
        ([2, 3], [0, 1], OWN_GPU, 0, 2),
    ],
)
def test_the_rule_runs_where_both_models_are_else_where_the_target_is(
    target: list[int], draft: list[int], kind: DraftLayout, draft_source_rank: int, verify_rank: int
) -> None:
    layout = _layout(target, draft, kind)
    assert (layout.draft_source_rank, layout.verify_rank) == (draft_source_rank, verify_rank)
    assert _layout(target, [], kind).verify_rank == target[0]


@pytest.mark.parametrize(
    ("target", "draft", "target_ranks", "draft_ranks"),
    [
        (TargetPlacement(), DraftPlacement(), [0, 1, 2, 3], [0]),
        (TargetPlacement(ranks=[2, 0]), DraftPlacement(), [0, 2], [0]),
        (TargetPlacement(tp_size=3), DraftPlacement(ranks=[3]), [0, 1, 2], [3]),
        (TargetPlacement(), DraftPlacement(kind=SHARDED, tp_size=2), [0, 1, 2, 3], [0, 1]),
        (TargetPlacement(), DraftPlacement(kind=OWN_GPU, tp_size=2), [0, 1], [2, 3]),
        (TargetPlacement(ranks=[2, 3]), DraftPlacement(kind=OWN_GPU), [2, 3], [1]),
        (TargetPlacement(ranks=[1, 2]), DraftPlacement(kind=REPLICATED), [1, 2], [1, 2]),
        (TargetPlacement(stages=2), DraftPlacement(), [0, 1, 2, 3], [0]),
        (TargetPlacement(stages=2), DraftPlacement(kind=SHARDED), [0, 1, 2, 3], [0, 1]),
        (TargetPlacement(stages=2), DraftPlacement(kind=SHARDED, tp_size=3), [0, 1, 2, 3], [0, 1, 2]),
        (TargetPlacement(stages=2, tp_size=1), DraftPlacement(kind=OWN_GPU), [0, 1], [3]),
    ],
)
def test_what_is_left_open_is_decided(
    target: TargetPlacement, draft: DraftPlacement, target_ranks: list[int], draft_ranks: list[int]
) -> None:
    found = lay_out(PlacementConfig(target=target, draft=draft), world_size=4, has_draft=True)
    assert (found.target_ranks, found.draft_ranks) == (tuple(target_ranks), tuple(draft_ranks))


@pytest.mark.parametrize(
    ("target", "stages"),
    [
        (TargetPlacement(), ((0, 1, 2, 3),)),
        (TargetPlacement(stages=2), ((2, 3), (0, 1))),
        (TargetPlacement(stages=4), ((1,), (2,), (3,), (0,))),
        (TargetPlacement(stages=2, ranks=[3, 1]), ((3,), (1,))),
    ],
)
def test_the_first_ranks_have_the_last_stage(target: TargetPlacement, stages: tuple[tuple[int, ...], ...]) -> None:
    layout = lay_out(PlacementConfig(target=target), world_size=4, has_draft=True)
    assert (layout.stages, layout.scoring_ranks, layout.verify_rank) == (stages, stages[-1], stages[-1][0])


def test_a_draft_on_ranks_of_another_stage_is_apart() -> None:
    placement = PlacementConfig(target=TargetPlacement(stages=2), draft=DraftPlacement(ranks=[1]))
    layout = lay_out(placement, world_size=2, has_draft=True)
    assert (layout.is_apart, layout.draft_source_rank, layout.verify_rank) == (True, 1, 0)


@pytest.mark.parametrize(
    ("target", "draft", "sentence"),
    [
        (
            TargetPlacement(stages=3),
            DraftPlacement(),
            "ranks 0 1 2 3 out evenly: use 1 or 2 or 4 stages, or name other",
        ),
        (TargetPlacement(stages=2), DraftPlacement(kind=OWN_GPU), "ranks 0 1 2 out evenly: use 1 or 3 stages, or name"),
        (
            TargetPlacement(stages=2, tp_size=3),
            DraftPlacement(),
            "must be between 1 and the number of ranks, here 4 ov",
        ),
        (TargetPlacement(stages=2), DraftPlacement(kind=REPLICATED, ranks=[1, 2]), "are not all among ranks 0 1"),
    ],
)
def test_stages_that_ranks_cannot_have_are_refused(
    target: TargetPlacement, draft: DraftPlacement, sentence: str
) -> None:
    placement = PlacementConfig(target=target, draft=draft)
    (found,) = problems_of(placement, world_size=4, has_draft=True)
    assert sentence in found


def test_without_a_draft_the_target_has_all_ranks() -> None:
    found = lay_out(PlacementConfig(draft=DraftPlacement(kind=OWN_GPU)), world_size=4, has_draft=False)
    assert (found.target_ranks, found.draft_ranks) == ((0, 1, 2, 3), ())


def test_only_a_draft_on_several_ranks_shares_rows() -> None:
    layouts = [
        _layout([0, 1], ranks, kind) for ranks, kind in (([0, 1], REPLICATED), ([0], REPLICATED), ([0, 1], SHARDED))
    ]
    assert [layout.splits_batch for layout in layouts] == [True, False, False]


def test_ranks_that_hold_nothing_are_named_with_what_would_help() -> None:
    layout = _layout([0, 1], [1], ONE_RANK)
    assert idle(layout, num_ranks=2) is None
    said = "ranks 2 3 would hold nothing: the target is on ranks 0 1, the draft on rank 1; name them in"
    assert (idle(layout, num_ranks=4) or "").startswith(said)
