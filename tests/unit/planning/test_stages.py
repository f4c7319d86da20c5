"""What a plan says of stages: bytes of each rank, time of each stage and of messages, and when they are taken."""

from dataclasses import replace

import pytest

from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import Link
from llama_ssp.planning.collectives import message_s, round_messages
from llama_ssp.planning.layouts import choose_placement
from llama_ssp.planning.memory import fits, memory
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel, bubble
from llama_ssp.planning.weights import model_bytes, shares
from tests.helpers.planning import make_spec, times_of

NODES = replace(hardware.load("g5_12xlarge"), num_nodes=2)
"""Two nodes of four A10G."""


def staged(num_stages: int = 2, **changes: object) -> PlanSpec:
    return replace(make_spec("65B", num_ranks=8), num_stages=num_stages, **changes)  # type: ignore[arg-type]


def test_stages_share_the_weights_and_the_cache_of_the_same_ranks_in_a_node() -> None:
    spec = staged()
    ranks, of_node = memory(spec, NODES), shares(spec.target.shape, num_ranks=4)
    whole = sum(model_bytes(held, spec.target, device="cuda").total_bytes for held in of_node)
    assert sum(rank.target_weights_bytes for rank in ranks) == whole
    first, last = ranks[4:], ranks[:4]  # the first ranks have the last stage
    table = 2 * spec.target.shape.vocab_size * spec.target.shape.hidden_size
    norm = 2 * spec.target.shape.hidden_size
    layer = (whole - 2 * table - 4 * norm) // 80
    of_first, of_last = [len(spec.stages[number]) * layer + table for number in (0, 1)]
    assert sum(rank.target_weights_bytes for rank in first) == of_first
    assert sum(rank.target_weights_bytes for rank in last) == of_last + 4 * norm
    cached = [rank.target_cache_bytes for rank in memory(make_spec("65B", num_ranks=4), NODES)]
    assert [one.target_cache_bytes + other.target_cache_bytes for one, other in zip(first, last, strict=True)] == cached


def test_a_step_takes_the_time_of_all_stages_and_of_the_messages_between_them() -> None:
    spec = staged(batch_size=3)
    costs = CostModel(spec, NODES)
    stages_s, message = costs.stages_s(1), 3 * 2 * spec.target.shape.hidden_size
    hop_s = message_s(NODES, (4, 0), message / 4)
    assert costs.forward(costs.target, 1).total_s == pytest.approx(sum(stages_s) + hop_s)
    assert round_messages(spec, 0)["hidden"].received_bytes == message
    assert bubble(costs, 1) == pytest.approx(1 - sum(stages_s) / 2 / (sum(stages_s) + hop_s))
    (note,) = [note for note in make_plan(spec, NODES).notes if note.startswith("stages of a plain step")]
    assert "48.0 KiB" in note
    found = document(make_plan(spec, NODES))["target"]["stages"]
    assert [(one["ranks"], one["sent_bytes_per_token"]) for one in found] == [([4, 5, 6, 7], 16384), ([0, 1, 2, 3], 0)]


@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_groups_follow_each_other_at_the_pace_of_the_slowest_stage(num_groups: int) -> None:
    spec = staged(2, batch_size=9, num_groups=num_groups)
    costs, rows = CostModel(spec, NODES), -(-9 // num_groups)
    of_group = CostModel(replace(spec, batch_size=rows, num_groups=1), NODES)
    stages_s, hop_s = of_group.stages_s(2), of_group.hops_s(2 * rows)
    total_s = sum(stages_s) + (num_groups - 1) * max(stages_s) + num_groups * hop_s
    assert costs.forward(costs.target, 2).total_s == pytest.approx(total_s)
    assert costs.stages_s(2) == pytest.approx([num_groups * each for each in stages_s])
    of_stages = sum(stage.collectives(rows, 2, 2)[0] for stage in costs.stages)
    assert costs.collectives(1)[0] == of_group.collectives(1)[0] + (num_groups - 1) * (of_stages + 1)


def test_as_many_groups_are_planned_as_are_fastest() -> None:
    """Weights are read once for each group; products of many tokens take turns at no cost."""
    few, many = (staged(2, batch_size=rows, draft=None, draft_ranks=(), num_draft_tokens=0) for rows in (4, 4096))
    assert CostModel(few, NODES).num_groups == 1
    costs, some = CostModel(many, NODES), replace(many, batch_size=192)
    assert costs.num_groups > 1
    one, two = (CostModel(replace(some, num_groups=number), NODES).plain_s() for number in (1, 2))
    assert 0.8 * one < two < one
    assert CostModel(some, NODES).num_groups == 1, "so little may be an error"
    others = [CostModel(replace(many, num_groups=number), NODES).plain_s() for number in (1, 2, 3, 4)]
    assert costs.plain_s() == min(others)
    assert f"with 4096 rows in {costs.num_groups} groups" in " ".join(make_plan(many, NODES).notes)
    assert CostModel(replace(few, num_groups=5), NODES).num_groups == 4, "of a row each"


def test_graphs_of_rounds_hold_the_forwards_of_all_groups() -> None:
    def graphs_bytes(**changes: object) -> int:
        spec = staged(2, draft=None, draft_ranks=(), num_draft_tokens=0, batch_size=4, prompt_tokens=4096, **changes)
        return memory(spec, NODES)[0].graphs_bytes

    one = graphs_bytes()
    assert one > 0
    assert [graphs_bytes(num_groups=number) for number in (1, 3, 9)] == [one, 3 * one, 4 * one]


def test_one_stage_is_the_plan_without_stages() -> None:
    plain, one = make_spec("65B", num_ranks=8), staged(1, layers=(80,))
    assert memory(one, NODES) == memory(plain, NODES)
    assert times_of(one, NODES) == times_of(plain, NODES)


def test_a_prompt_of_many_chunks_takes_one_pass_and_the_slowest_stage_for_each_further_chunk() -> None:
    times = [times_of(staged(prompt_tokens=512 * number), NODES).prefill_s for number in (1, 2)]
    in_node = [times_of(replace(make_spec("65B", num_ranks=4), prompt_tokens=512 * n), NODES).prefill_s for n in (1, 2)]
    assert times[0] >= in_node[0]
    assert times[1] - times[0] < 0.6 * (in_node[1] - in_node[0])


def test_a_target_that_fits_no_node_has_a_stage_on_each_and_another_one_stays_in_its_node() -> None:
    slow = replace(NODES, network=Link(bandwidth_bytes_per_s=4e8, latency_s=1e-4))
    large = make_spec("llama3_70B", num_ranks=8)
    assert not fits(make_spec("llama3_70B", num_ranks=4), slow)
    chosen, sentence = choose_placement(large, slow, num_ranks=8, divides=True)
    assert (chosen.num_stages, chosen.target_ranks) == (2, tuple(range(8)))
    assert "the target on ranks 0 1 2 3 4 5 6 7 in 2 stages" in sentence
    small, _ = choose_placement(make_spec("30B", num_ranks=8), slow, num_ranks=8, divides=True)
    assert (small.num_stages, small.num_replicas) == (1, 2)
