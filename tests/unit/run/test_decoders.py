"""Decoders are made of what a rank holds."""

from typing import Any
from unittest.mock import Mock

import pytest

from llama_ssp.ranks.comms import build_mesh
from llama_ssp.run.decoders import build_decoder
from llama_ssp.settings.layout import Layout
from llama_ssp.settings.schema import DraftLayout

ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout


@pytest.mark.parametrize(
    ("layout", "holders"),
    [
        (Layout(target_ranks=(0, 1), draft_ranks=(0, 1), draft_kind=SHARDED), [((0, 1), (0, 1))] * 2),
        (Layout(target_ranks=(0, 1), draft_ranks=(2,), draft_kind=OWN_GPU), [((0, 1), None)] * 2 + [(None, (2,))]),
        (Layout(target_ranks=(0, 1), draft_ranks=(0, 1), draft_kind=REPLICATED), [((0, 1), "0"), ((0, 1), "1")]),
        (
            Layout(target_ranks=(0, 1), draft_ranks=(0,), draft_kind=ONE_RANK, num_stages=2),
            [((0, 1), (0,)), ((0, 1), None)],
        ),
        (
            Layout(target_ranks=(0, 1), draft_ranks=(2,), draft_kind=OWN_GPU, num_stages=2),
            [((0, 1), None)] * 2 + [(None, (2,))],
        ),
    ],
)
def test_prompts_are_read_by_all_ranks_of_a_model(layout: Layout, holders: list[object]) -> None:
    """Those of all stages too, which send to each other what they have read."""
    size = len(layout.ranks)

    def mesh_of(rank: int) -> Any:
        world: Any = Mock(size=size, rank=rank, alone=lambda: str(rank))
        world.subgroup = lambda ranks: ranks if rank in ranks else None
        return build_mesh(layout, world)

    assert [mesh_of(rank).holders for rank in range(size)] == holders


@pytest.mark.seconds
def test_a_round_has_them(pair: Any) -> None:
    round_ = build_decoder(pair.models, pair.config, speculative=True).round
    assert None not in round_.holders
    assert round_.holders == pair.models.mesh.holders
