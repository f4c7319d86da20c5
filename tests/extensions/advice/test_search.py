"""Searches: what they try, in which order they rank it, and with which settings."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.extensions.advice.search import _drafts_of, by_length, length_setting, placement_settings, search
from llama_ssp.machines import hardware
from llama_ssp.planning.layouts import layouts
from llama_ssp.planning.memory import fits, memory
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.layout import lay_out
from llama_ssp.settings.schema import DraftLayout, DraftPlacement, PlacementConfig
from llama_ssp.storage.formats import formats
from tests.helpers.extensions import module_of, need
from tests.helpers.planning import make_spec, small_model, times_of

A10G, A100 = hardware.load("g5_12xlarge"), hardware.load("8xa100_80gb")


@cache
def choices() -> list[dict[str, Any]]:
    """What the planner suggests for a large model on four small GPUs."""
    return search(make_spec("65B", "7B", num_ranks=4), A10G)


def choice(
    found: list[dict[str, Any]], target: str, draft: str | None, kind: str | None, *, num_ranks: int
) -> dict[str, Any]:
    """That of one unquantized pair and placement."""
    wanted = (target, "fp16", draft, kind, num_ranks)
    keys = ("target", "quantization", "draft", "draft_kind", "num_ranks")
    return next(
        one for one in found if tuple(one[key] for key in keys) == wanted and one["draft_quantization"] not in formats()
    )


def test_a_search_finds_a_tree_for_a_head_and_none_for_a_model_or_many_rows() -> None:
    module_of("heads")

    def trees_of(batch_size: int) -> set[tuple[str | None, str | None]]:
        spec = make_spec("qwen3_8B", "qwen3_0.6B", batch_size=batch_size)
        return {(row["draft"], row["tree"]) for row in search(spec, hardware.load("1xh100"))}

    few, many = trees_of(1), trees_of(64)
    assert {("eagle3_qwen3_8B", "2x1x1"), ("eagle3_qwen3_8B", None), ("qwen3_0.6B", None)} <= few
    assert {tree for draft, tree in few if draft != "eagle3_qwen3_8B"} == {None}
    assert {tree for _, tree in many} == {None}


def heads_of(name: str, /, **changes: Any) -> set[str]:
    """The heads that a search tries for a model."""
    drafts = _drafts_of(replace(catalogue.load(name), **changes), catalogue.entries())
    return {draft.name for draft in drafts if draft.shape and draft.shape.is_head}


@pytest.mark.seconds
def test_a_search_tries_the_heads_of_the_model_and_none_of_another_one_as_wide_nor_of_instruct_for_the_base() -> None:
    module_of("heads")
    instruct = "meta-llama/Llama-3.1-8B-Instruct"
    assert heads_of("qwen3_32B") == {"eagle3_qwen3_32B"}
    assert heads_of("llama3_8B", name=instruct, hub_id=instruct) == {"eagle3_llama3_8B"}
    assert heads_of("llama3_8B", name="local", hub_id=None, path="./folder") == {"eagle3_llama3_8B"}
    for name in ("llama2_13B", "llama3_8B", "llama3_70B"):
        assert heads_of(name) == heads_of(name, name=catalogue.load(name).hub_id) == set()
    of_hub = replace(make_spec("llama3_8B").target, name=str(catalogue.load("llama3_8B").hub_id))
    assert not any(row["tree"] for row in search(make_spec(of_hub, num_ranks=8), hardware.load("8xh200")))


@pytest.mark.seconds
def test_the_asked_model_comes_first_then_the_larger_ones_and_what_does_not_fit_comes_last_with_the_reason() -> None:
    assert list(dict.fromkeys(one["target"] for one in choices())) == ["65B", "30B", "13B", "7B"]
    for target in ("7B", "13B", "30B", "65B"):
        found = [one for one in choices() if one["target"] == target]
        times = [one["ms_per_token"] for one in found if one["ms_per_token"] is not None]
        assert times == sorted(times)
        assert all(one["ms_per_token"] is None and one["reason"] for one in found[len(times) :])


def test_every_size_precision_placement_and_draft_of_the_vocabulary_is_tried() -> None:
    need("eight_bits")
    need("four_bits")
    quantizations = {"fp16", "int8", "nf4", "int8_weight_only", "int4_weight_only"}
    assert {choice["quantization"] for choice in choices()} == quantizations
    assert {choice["draft_kind"] for choice in choices()} == {None, "sharded", "one_rank", "own_gpu"}
    assert {(choice["num_replicas"], choice["num_ranks"]) for choice in choices()} == {(1, 4), (2, 2), (4, 1)}
    assert {one["draft"] for one in choices() if one["target"] == "30B"} == {None, "tinyllama_1B", "7B", "13B"}


@pytest.mark.parametrize("num_copies", [1, 2, 4])
def test_a_choice_without_a_draft_has_the_time_of_a_replica_and_the_tokens_of_all(num_copies: int) -> None:
    found = choice(choices(), "7B", None, None, num_ranks=4 // num_copies)
    spec = make_spec("7B", num_ranks=4 // num_copies, num_replicas=num_copies)
    assert found["ms_per_token"] == pytest.approx(1e3 * times_of(spec, A10G).plain_s)
    assert found["tokens_per_s"] == pytest.approx(1e3 * num_copies / found["ms_per_token"])
    assert (found["speedup"], found["num_draft_tokens"], found["num_replicas"]) == (1.0, 0, num_copies)


@pytest.mark.seconds
def test_a_choice_has_the_best_k_of_those_that_fit_whatever_k_was_asked_for() -> None:
    """Random numbers, logits and graphs grow with K."""
    spec = make_spec("7B", "tinyllama_1B", num_draft_tokens=1000)
    needed = memory(replace(spec, num_draft_tokens=2), A10G)[0].needed_bytes
    machine = replace(A10G, num_gpus=1, memory_bytes=needed)
    assert not fits(spec, machine)
    found = choice(search(spec, machine), "7B", "tinyllama_1B", "one_rank", num_ranks=1)
    assert (found["num_draft_tokens"], found["needed_bytes"]) == (2, needed)
    assert found["is_tight"]


def test_auto_without_room_gives_way_to_a_fixed_k() -> None:
    spec, auto = make_spec("13B", "tinyllama_1B", acceptance=None), module_of("adaptive.records").AUTO
    adaptive = memory(replace(spec, num_draft_tokens=max(auto.lengths(None)), chooser=auto), A100)[0]
    found = {
        missing: choice(
            search(spec, replace(A100, num_gpus=1, memory_bytes=adaptive.needed_bytes - missing)),
            "13B",
            "tinyllama_1B",
            "one_rank",
            num_ranks=1,
        )
        for missing in (0, 1)
    }
    assert (found[0]["adapts"], found[1]["adapts"]) == (True, False)
    assert (found[1]["reason"], "cuda_graphs=false" in found[1]["settings"]) == (None, False)
    assert f"speculation.num_draft_tokens={found[1]['num_draft_tokens']}" in found[1]["settings"]


@pytest.mark.seconds
def test_what_has_no_room_for_cuda_graphs_is_tried_without_them() -> None:
    spec = make_spec("13B")
    needed = memory(spec, A100)[0].needed_bytes
    with_graphs, without, neither = (
        choice(search(spec, replace(A100, num_gpus=1, memory_bytes=size)), "13B", None, None, num_ranks=1)
        for size in (needed, needed - 1, needed - memory(spec, A100)[0].graphs_bytes - 1)
    )
    assert "cuda_graphs=false" not in with_graphs["settings"]
    assert (without["reason"], without["settings"][-1]) == (None, "cuda_graphs=false")
    eager_s = times_of(replace(spec, cuda_graphs=False), A100).plain_s
    assert without["ms_per_token"] == pytest.approx(1e3 * eager_s)
    assert eager_s > 1.1 * times_of(spec, A100).plain_s
    assert neither["reason"]


def test_a_draft_is_also_tried_in_the_format_that_is_read_fastest_and_a_head_is_not() -> None:
    need("eight_bits")
    need("four_bits")
    module_of("heads")
    spec = make_spec("qwen3_8B", "qwen3_0.6B")
    found = [one for one in search(spec, replace(A100, num_gpus=1)) if one["quantization"] == "bf16"]
    of_draft = {(one["draft"], one["draft_quantization"]): one for one in reversed(found) if not one["tree"]}
    assert {form for name, form in of_draft if name == "qwen3_0.6B"} == {"bf16", "int4_weight_only"}
    assert {form for name, form in of_draft if name == "eagle3_qwen3_8B"} == {"bf16"}
    packed = of_draft["qwen3_0.6B", "int4_weight_only"]
    timed = times_of(make_spec("qwen3_8B", "qwen3_0.6B", of_draft={"quantization": "int4_weight_only"}), A100)
    assert packed["ms_per_token"] == pytest.approx(1e3 * min(timed.by_num_draft_tokens))
    assert packed["ms_per_token"] < of_draft["qwen3_0.6B", "bf16"]["ms_per_token"]
    assert "draft.model.quantization=int4_weight_only" in packed["settings"]


def test_a_pair_that_nobody_measured_chooses_k_while_it_runs() -> None:
    need("adaptive")
    spec = make_spec("65B", "tinyllama_1B", num_ranks=8, acceptance=None)
    timed = times_of(spec, A100)
    (token_s, adaptive), *others = by_length(spec, timed)
    assert length_setting(adaptive) == "speculation.num_draft_tokens=auto"
    assert {other.num_draft_tokens for _, other in others if not other.adapts} == set(range(1, 17))
    assert token_s == pytest.approx(times_of(adaptive, A100).speculative_s, rel=1e-3)
    assert not any(by_length(replace(spec, draft=None), times_of(replace(spec, draft=None), A100)))


PAIR, ALONE = make_spec("13B", "7B"), make_spec("13B")


@pytest.mark.parametrize("spec", [PAIR, ALONE])
def test_the_settings_of_a_layout_lead_back_to_it(spec: PlanSpec) -> None:
    for one in layouts(replace(spec, batch_size=2), num_ranks=8, divides=True, thorough=True):
        given = dict(setting.split("=", 1) for setting in placement_settings(one))
        size, num_replicas = given.get("placement.draft.tp_size"), int(given.get("placement.num_replicas", 1))
        kind = DraftLayout[given.get("placement.draft.kind", "one_rank")]
        draft = DraftPlacement(kind=kind, tp_size=int(size) if size else None)
        placement = PlacementConfig(draft=draft, num_replicas=num_replicas)
        found = lay_out(placement, world_size=8, has_draft=spec.draft is not None)
        assert (found, num_replicas) == (one.layout, one.num_replicas)


def test_a_model_beyond_the_catalogue_is_searched_alone_with_the_draft_of_the_job() -> None:
    found = search(make_spec(small_model(), "7B"), replace(A10G, num_gpus=1))
    assert {choice["target"] for choice in found} == {"small"}
    assert {choice["draft"] for choice in found} == {None, "7B"}


def test_a_search_also_tries_rounds_that_overlap() -> None:
    machine = replace(hardware.load("laptop_cpu"), num_gpus=2)
    placed: dict[str, Any] = {"draft_kind": DraftLayout.own_gpu, "draft_ranks": (1,)}
    spec = make_spec("tiny", "tiny-draft", device="cpu", cuda_graphs=False, **placed)
    ranked = [choice for choice in search(spec, machine) if choice["overlaps"]]
    assert {choice["draft_kind"] for choice in ranked} == {"own_gpu"}
    assert all("speculation.overlap=true" in choice["settings"] for choice in ranked)
