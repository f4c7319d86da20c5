"""Machines compared for one job: GPUs, replicas, speed, price, limits, and their order."""

from dataclasses import replace
from typing import Any

import pytest

from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig, Price
from llama_ssp.planning.memory import memory
from llama_ssp.planning.search import compare, nothing_left
from llama_ssp.settings import catalogue
from llama_ssp.settings.drafters import ModelDraftConfig
from llama_ssp.settings.schema import MODEL_DRAFT, NO_DRAFT, DrafterConfig, Objective, PlanConfig, TextKind
from tests.helpers.planning import make_job, times_of

A10G = replace(hardware.load("g5_12xlarge"), price=Price(usd_per_hour={4: 5.672}))
H100 = replace(hardware.load("8xh100"), price=Price(usd_per_hour={8: 31.92}))
"""Rented as whole nodes."""


def _config(target: str = "llama3_70B", draft: str | None = None, **fields: Any) -> PlanConfig:  # noqa: ANN401 - its fields
    drafter = DrafterConfig(kind=NO_DRAFT)
    if draft:
        drafter = ModelDraftConfig(kind=MODEL_DRAFT, model=catalogue.load(draft))
    return PlanConfig(model=catalogue.load(target), draft=drafter, hardware={}, **fields)


def _fitting(config: PlanConfig, *machines: HardwareConfig) -> list[Any]:
    """Choices with all figures that some lack."""
    return [choice for choice in compare(config, machines) if choice.reason is None]


def test_replicas_fill_a_node_that_is_rented_as_a_whole() -> None:
    found = {choice.num_gpus: choice for choice in _fitting(_config(), H100)}
    assert {number: choice.num_replicas for number, choice in found.items()} == {2: 4, 4: 2, 8: 1}
    assert {choice.usd_per_hour for choice in found.values()} == {31.92}
    job = make_job("llama3_70B", num_ranks=2, num_replicas=4)
    timed = times_of(job, H100)
    assert found[2].ms_per_token == pytest.approx(1e3 * timed.plain_s)
    assert found[2].tokens_per_s == pytest.approx(4 / timed.plain_s)
    assert found[2].usd_per_million_tokens == pytest.approx(31.92 * 1e6 / 3600 * timed.plain_run_s / 4)
    assert found[2].needed_bytes == max(rank.needed_bytes for rank in memory(job, H100))


def test_every_number_of_gpus_that_is_rented_is_tried_and_filled_with_replicas() -> None:
    machine = replace(H100, price=Price(usd_per_hour={1: 3.0, 4: 10.0, 8: 19.0}, vendor="a vendor"))
    found = {(choice.num_gpus, choice.num_replicas): choice for choice in _fitting(_config(), machine)}
    assert {key: choice.usd_per_hour for key, choice in found.items()} == {
        (2, 2): 10.0, (4, 1): 10.0, (2, 4): 19.0, (4, 2): 19.0, (8, 1): 19.0
    }  # fmt: skip
    assert {"hardware.num_gpus=4", "placement.num_replicas=2"} <= {*found[2, 2].settings}


def test_what_two_machines_of_a_vendor_have_in_common_is_tried_once() -> None:
    one, eight = hardware.load("1xh100"), hardware.load("8xh100")
    sizes = {
        choice.machine: {other.usd_per_hour for other in _fitting(_config("7B"), eight, one)
                         if other.machine == choice.machine}
        for choice in _fitting(_config("7B"), eight, one)
    }  # fmt: skip
    assert sizes == {"1xh100": {4.29}, "8xh100": {8.38, 16.36, 31.92}}


def _cost(choice: Any, objective: Objective) -> float:  # noqa: ANN401 - has all figures
    costs = (choice.ms_per_token, -choice.run_tokens_per_s, choice.usd_per_million_tokens, choice.usd_per_hour)
    return float(dict(zip(Objective, costs, strict=True))[objective])


@pytest.mark.parametrize("objective", Objective)
def test_choices_are_in_the_order_of_the_objective_and_those_ruled_out_come_last(objective: Objective) -> None:
    found = compare(_config("13B", objective=objective), [A10G, H100])
    is_out = [choice.reason is not None for choice in found]
    assert is_out == sorted(is_out)
    left = [_cost(choice, objective) for choice in found if choice.reason is None]
    assert left == sorted(left)
    assert len({choice.machine for choice in found[: len(left)]}) == 2


def test_prices_of_the_settings_replace_those_of_the_files_and_an_unknown_one_comes_last() -> None:
    free = replace(H100, name="1xl4", price=None)
    found = _fitting(_config("7B", objective=Objective.price), free, H100)
    assert [choice.machine for choice in found] == ["8xh100"] * 4 + ["1xl4"] * 4
    assert {(choice.usd_per_hour, choice.usd_per_million_tokens) for choice in found[4:]} == {(None, None)}
    found = _fitting(_config("7B", prices={"8xh100": 16.0, "1xl4": 8.0}), H100, free)
    assert {(choice.machine, choice.usd_per_hour) for choice in found} == {("8xh100", 16.0), ("1xl4", 8.0)}


def test_limits_rule_out_what_is_slower_dearer_later_or_without_a_price() -> None:
    free = replace(H100, name="mine", price=None)
    plain = {choice.num_gpus: choice for choice in _fitting(_config(), H100)}
    most, most_first = plain[4].ms_per_token, 0.9 * plain[8].first_token_ms
    found = compare(_config(max_ms_per_token=most, max_first_token_ms=most_first, max_price=20.0), [H100, free])
    said = {(choice.machine, choice.num_gpus): choice.reason or "" for choice in found}
    assert said["8xh100", 2].endswith(f" ms/token are more than max_ms_per_token={most:g}")
    assert said["8xh100", 8].endswith(f" ms to the first token are more than max_first_token_ms={most_first:g}")
    (dear, unknown) = compare(_config("65B", max_price=20.0, batch_size=64), [H100, free])[:2]
    assert {dear.reason, unknown.reason} == {
        "31.92 USD an hour are more than max_price=20", "no price is known: prices={mine:USD_PER_HOUR} gives one",
    }  # fmt: skip


@pytest.mark.parametrize("limit", ["max_ms_per_token", "max_first_token_ms"])
def test_with_a_limit_of_time_alone_the_cheapest_hour_comes_first(limit: str) -> None:
    """One stream of 20 tokens/s needs no machine of eight GPUs."""
    machine = replace(H100, price=Price(usd_per_hour={1: 3.0, 8: 19.0}))
    config, limited = _config("7B"), _config("7B")
    setattr(limited, limit, 50.0)
    found = [_fitting(each, machine)[0] for each in (config, limited, replace(limited, objective=Objective.latency))]
    assert [(choice.num_gpus, choice.usd_per_hour) for choice in found] == [(8, 19.0), (1, 3.0), (8, 19.0)]


def test_where_nothing_is_left_the_closest_choice_is_named() -> None:
    assert nothing_left(compare(_config(), [H100])) is None
    too_slow = str(nothing_left(compare(_config(max_ms_per_token=0.1), [H100, A10G])))
    assert too_slow.startswith("nothing is left of 2 machines; the closest is 8 x H100-SXM5-80GB: ")
    alone = replace(A10G, network=None)
    too_small = str(nothing_left(compare(_config(), [alone])))
    assert too_small.startswith("nothing is left of g5_12xlarge; the closest is 4 x A10G: rank 0 needs ")


def test_a_job_that_fits_no_node_is_tried_on_several_and_pays_for_all() -> None:
    found = _fitting(_config(), A10G)
    assert [(choice.num_gpus, choice.num_nodes, choice.num_replicas) for choice in found] == [(8, 2, 1)]
    assert found[0].usd_per_hour == pytest.approx(2 * 5.672)
    assert "hardware.num_nodes=2" in found[0].settings
    assert {choice.num_nodes for choice in compare(_config("7B"), [A10G])} == {1}


def test_a_draft_is_used_where_it_gains_and_placed_where_it_gains_most() -> None:
    config = _config(draft="llama3_1B")
    plain = {choice.num_gpus: choice.ms_per_token for choice in _fitting(_config(), H100)}
    for choice in _fitting(config, H100):
        assert choice.draft == "llama3_1B"
        assert choice.num_draft_tokens == 4
        assert (choice.ms_per_token) < plain[choice.num_gpus]
        assert f"placement.draft.kind={choice.draft_kind}" in choice.settings
    config.speculation.acceptance = 0.0
    assert {choice.draft for choice in _fitting(config, H100)} == {None}


def test_a_search_tries_every_storage_of_the_weights_and_the_best_k() -> None:
    one = replace(H100, num_gpus=1, network=None)
    assert _fitting(_config("llama2_70B"), one) == []
    config = _config("llama2_70B", "llama2_7B", search=True)
    config.speculation.acceptance = 0.8
    found = {choice.quantization: choice for choice in _fitting(config, one)}
    assert {"int8_weight_only", "int4_weight_only"} & found.keys()
    best = found["int4_weight_only"]
    packed = {"quantization": "int4_weight_only"}
    job = make_job("llama2_70B", best.draft, num_draft_tokens=best.num_draft_tokens, of_target=packed, of_draft=packed)
    timed = times_of(job, one)
    assert timed.best_num_draft_tokens == best.num_draft_tokens
    assert best.ms_per_token == pytest.approx(1e3 * timed.speculative_s)
    assert {f"{model}.quantization=int4_weight_only" for model in ("model", "draft.model")} <= {*best.settings}


def test_a_search_tries_the_heads_of_a_target_and_trees_where_few_rows_are_decoded() -> None:
    config = _config("qwen3_8B", search=True, concurrency=8)
    found = [choice for choice in _fitting(config, ONE) if choice.quantization == "bf16"]
    config.concurrency = 1
    few = [choice for choice in _fitting(config, ONE) if choice.quantization == "bf16"]
    assert [choice.draft for choice in few] == ["eagle3_qwen3_8B"]
    assert f"speculation.tree={few[0].tree}" in few[0].settings
    assert {choice.tree for choice in found} == {None}


def test_a_cpu_has_one_replica_and_shares_its_memory() -> None:
    laptop = replace(hardware.load("laptop_cpu"), num_gpus=2)
    found = _fitting(_config("tiny"), laptop)
    assert {(choice.num_gpus, choice.num_replicas) for choice in found} == {(1, 1), (2, 1)}
    assert {choice.num_gpus: choice.capacity_bytes for choice in found} == {
        number: replace(laptop, num_gpus=number).rank_bytes for number in (1, 2)
    }


ONE = replace(H100, num_gpus=1, price=Price(usd_per_hour={1: 4.0}))
"""One GPU that is rented alone."""


def test_the_objective_chooses_on_a_machine_too() -> None:
    """A draft that reads a long prompt as well decodes faster, and makes each of a few tokens dearer."""
    config = _config("llama3_8B", "llama3_1B", prompt_tokens=8000, max_new_tokens=8)
    config.speculation.acceptance = 0.9
    (fastest,), (cheapest,) = (
        _fitting(replace(config, objective=objective), ONE) for objective in (Objective.latency, Objective.price)
    )
    assert (fastest.draft, cheapest.draft) == ("llama3_1B", None)
    assert fastest.ms_per_token < cheapest.ms_per_token
    assert cheapest.usd_per_million_tokens < fastest.usd_per_million_tokens


def test_replicas_share_the_rows_that_are_served_at_once() -> None:
    machine = replace(H100, price=Price(usd_per_hour={1: 3.0, 4: 10.0, 8: 19.0}))
    found = _fitting(_config("llama3_8B", concurrency=36), machine)
    assert {(choice.num_replicas, choice.batch_size) for choice in found} == {(1, 36), (2, 18), (4, 9), (8, 5)}
    for choice in found:
        assert (f"batch_size={choice.batch_size}" in choice.settings) == (choice.batch_size > 1)
        assert choice.tokens_per_s == pytest.approx(choice.num_replicas * choice.batch_size * 1e3 / choice.ms_per_token)


def test_a_search_serves_fewer_rows_at_once_where_all_would_exceed_the_limit_and_the_others_wait() -> None:
    config = _config("llama3_8B", concurrency=64, prompt_tokens=1000, max_new_tokens=100, objective=Objective.price)
    config.speculation.acceptance = 0.0
    (whole,) = _fitting(config, ONE)
    assert whole.batch_size == 64
    most = 0.7 * whole.ms_per_token
    limited = replace(config, max_ms_per_token=most)
    assert [choice.reason is None for choice in compare(limited, [ONE])] == [False]
    found = _fitting(replace(limited, search=True), ONE)
    (fewer,) = [choice for choice in found if choice.quantization == "bf16"]
    assert fewer.batch_size in {4, 16}
    assert fewer.ms_per_token <= most
    completion_ms = 1e3 * fewer.batch_size * 100 / fewer.run_tokens_per_s
    num_earlier = 64 // fewer.batch_size - 1
    prompts_ms = whole.first_token_ms * fewer.batch_size / 64
    assert fewer.first_token_ms == pytest.approx(num_earlier * completion_ms + prompts_ms, rel=0.05)


def test_a_choice_has_the_ranges_of_its_times_and_of_its_price() -> None:
    config = _config("llama3_8B", "llama3_1B", concurrency=8, prompt_tokens=1000, search=True)
    for choice in _fitting(config, ONE):
        figures = (
            (choice.ms_per_token, choice.ms_per_token_range),
            (choice.first_token_ms, choice.first_token_ms_range),
            (choice.usd_per_million_tokens, choice.usd_per_million_tokens_range),
        )
        for figure, ends in figures:
            assert 0.4 * figure < ends[0] < figure < ends[1] < 3 * figure
    free = _fitting(config, replace(ONE, price=None))
    assert {choice.usd_per_million_tokens_range for choice in free} == {None}


def test_a_search_for_texts_that_copy_tries_look_up() -> None:
    config = _config("smollm2_135M", search=True)
    config.sampling.temperature = 0.0
    assert {choice.draft for choice in _fitting(config, ONE)} == {None}
    config.speculation.text = TextKind.copy
    found = _fitting(config, ONE)
    assert {choice.draft for choice in found} == {"ngram"}
    assert all("draft=ngram" in choice.settings for choice in found)
