"""The layouts of ranks, and the one that `placement=auto` takes."""

from dataclasses import replace

import pytest

from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import Link
from llama_ssp.planning.layouts import choose_placement, layouts
from llama_ssp.planning.memory import fits
from llama_ssp.planning.spec import block_sizes, on_block
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.text.messages import rounded
from tests.helpers.lanes import pairs
from tests.helpers.planning import make_spec, small_model, times_of

A10G, A100 = hardware.load("g5_12xlarge"), hardware.load("8xa100_80gb")
PAIR, ALONE = make_spec("13B", "7B"), make_spec("13B")


def test_ranks_are_used_by_equal_blocks_in_each_of_which_a_draft_has_every_place() -> None:
    assert (block_sizes(16), block_sizes(6)) == ([16, 8, 4, 2, 1], [6, 3, 2, 1])

    def replicas(num_replicas: int, *, divides: bool) -> list[tuple[int, int]]:
        found = layouts(replace(ALONE, num_replicas=num_replicas), num_ranks=4, divides=divides, thorough=False)
        return [(one.num_replicas, len(one.target_ranks)) for one in found]

    assert replicas(1, divides=True) == [(1, 4), (2, 2), (4, 1)]
    assert (replicas(2, divides=False), replicas(2, divides=True)) == ([(2, 2)], [(2, 2), (4, 1)])
    assert [(one.draft_kind, one.target_ranks, one.draft_ranks) for one in on_block(PAIR, 2)] == [
        (DraftLayout.one_rank, (0, 1), (0,)),
        (DraftLayout.sharded, (0, 1), (0, 1)),
        (DraftLayout.own_gpu, (0,), (1,)),
    ]
    rows = replace(PAIR, batch_size=2)
    kinds = [{one.draft_kind for one in on_block(rows, size)} for size in (2, 1)]
    assert kinds == [set(DraftLayout), {DraftLayout.one_rank}]
    sizes = {(one.draft_kind, len(one.draft_ranks)) for one in on_block(PAIR, 4, thorough=True)}
    assert {(DraftLayout.sharded, size) for size in (2, 3, 4)} | {(DraftLayout.own_gpu, 3)} < sizes


@pairs(kind=[*DraftLayout], batch_size=[1, 4])
def test_no_other_placement_is_faster(kind: DraftLayout, batch_size: int) -> None:
    spec = make_spec("13B", "7B", num_ranks=8, batch_size=batch_size)
    chosen, sentence = choose_placement(spec, A100, num_ranks=8)
    targets = spec.target_ranks[:-1] if kind is DraftLayout.own_gpu else spec.target_ranks
    drafts = {DraftLayout.one_rank: (0,), DraftLayout.own_gpu: (7,)}.get(kind, targets)
    other = replace(spec, draft_kind=kind, target_ranks=targets, draft_ranks=drafts)
    least, rival = times_of(chosen, A100).speculative_run_s, times_of(other, A100).speculative_run_s
    assert least <= rival
    assert f"{rounded(1e3 * least)} ms per token" in sentence


@pytest.mark.parametrize(("model", "is_possible"), [("30B", True), ("65B", False)])
def test_what_does_not_fit_is_chosen_only_where_nothing_fits_and_that_is_said(model: str, is_possible: bool) -> None:
    spec = make_spec(model, "7B", num_ranks=4)
    assert not fits(spec, A10G)
    chosen, sentence = choose_placement(spec, A10G, num_ranks=4)
    assert (fits(chosen, A10G), "none fits" in sentence) == (is_possible, not is_possible)


def test_replicas_on_fewer_ranks_are_chosen_where_they_are_faster_and_where_that_is_allowed() -> None:
    two_nodes = replace(hardware.load("8xh100"), num_nodes=2)
    spec = make_spec("llama3_70B", num_ranks=16)
    chosen, sentence = choose_placement(spec, two_nodes, num_ranks=16, divides=True)
    assert (chosen.num_replicas, chosen.target_ranks) == (2, tuple(range(8)))
    assert "2 replicas, each with the target on ranks 0 1 2 3 4 5 6 7" in sentence
    kept = choose_placement(spec, two_nodes, num_ranks=16)[0]
    assert (kept.num_replicas, kept.target_ranks) == (1, tuple(range(16)))


@pytest.mark.parametrize(("latency_s", "num_replicas"), [(4e-6, 2), (2e-6, 1)])
def test_a_target_stays_in_a_node_that_holds_it_unless_nodes_are_linked_as_well(
    latency_s: float, num_replicas: int
) -> None:
    """By its forecast alone one target over both nodes would be faster."""
    node = replace(hardware.load("8xh100"), sums=[], link=Link(bandwidth_bytes_per_s=4.5e11, latency_s=2e-6))
    two_nodes = replace(node, num_nodes=2, network=Link(bandwidth_bytes_per_s=4.5e11, latency_s=latency_s))
    chosen, _ = choose_placement(make_spec("llama3_70B", num_ranks=16), two_nodes, num_ranks=16, divides=True)
    assert chosen.num_replicas == num_replicas


def test_what_cannot_be_laid_out_at_all_is_refused() -> None:
    with pytest.raises(PlacementError, match="attention heads"):
        choose_placement(make_spec(small_model(num_attention_heads=4)), A100, num_ranks=8)
