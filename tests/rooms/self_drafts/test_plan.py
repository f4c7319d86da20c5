"""What a plan of a target that drafts for itself counts: steps of its layers, and a small cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_ssp.kernels.parts import rows_of
from llama_ssp.machines import hardware
from llama_ssp.models.cache import StaticCache
from llama_ssp.planning.memory import memory
from llama_ssp.planning.spec import make_spec as spec_of_run
from llama_ssp.planning.timing import CostModel
from llama_ssp.rooms.self_drafts.records import SelfConfig
from llama_ssp.settings.trees import tree_shape
from llama_ssp.storage.formats import OWN_DTYPE
from tests.helpers.composed import compose_run
from tests.helpers.planning import make_spec

H100 = hardware.load("h100")
SPEC: dict[str, Any] = {"batch_size": 8, "prompt_tokens": 8000, "max_new_tokens": 100, "num_draft_tokens": 3}


def costs(tree: str | None = None, /, **draft: Any) -> CostModel:
    settings, shape = SelfConfig(kind="self", **draft), tree_shape(tree) if tree else None
    spec = SPEC | ({"num_draft_tokens": shape.num_nodes, "tree": shape} if shape else {})
    return CostModel(make_spec("7B", free_draft="self", free_settings=settings, **spec), H100)


def test_half_of_the_layers_take_half_of_the_time_but_for_the_output() -> None:
    whole, half = (costs(layers=number).drafting_s(3) for number in (32, 16))
    assert 0.45 < half / whole < 0.56


def test_a_tree_takes_a_forward_for_each_level() -> None:
    chain, tree = costs(layers=16), costs("2x2x1", layers=16)
    assert chain.drafting_s(3) < tree.drafting_s(10) < 1.5 * chain.drafting_s(3)


def test_a_fallback_takes_no_cost_away() -> None:
    words = "task=generate", "draft=self", "draft.layers=4", "speculation.num_draft_tokens=auto"
    for more in ([], ["draft.fallback=ngram"]):
        config, _ = compose_run(*words, *more)
        spec = spec_of_run(config, world_size=1, device="cpu", prompt_tokens=64)
        assert spec.free_terms.layers == 4


def test_a_window_reads_a_small_part_of_a_long_cache() -> None:
    whole, window = costs(layers=32).drafting_s(3), costs(window=512).drafting_s(3)
    assert window < 0.6 * whole


def test_the_small_cache_is_memory_of_the_draft() -> None:
    none, window = (memory(costs(**draft).spec, H100)[0] for draft in ({"layers": 8}, {"window": 508}))
    a_slot = 2 * 32 * 128 * 32 * 2
    assert none.draft_cache_bytes == 0
    assert window.draft_cache_bytes == pytest.approx(8 * (508 + 4 + 4) * a_slot, rel=0.01)


@pytest.mark.parametrize("cache_dtype", [OWN_DTYPE, "int8"])
@pytest.mark.parametrize("draft", [{"layers": 8}, {"window": 512}])
def test_bytes_at_32k_are_those_that_a_run_takes(draft: dict[str, Any], cache_dtype: str) -> None:
    """Of the caches of 7B on one H200, as a run makes them, on no device."""
    sizes = {**SPEC, "prompt_tokens": 32_000, "batch_size": 4}
    spec = make_spec("7B", free_draft="self", free_settings=SelfConfig(kind="self", **draft), **sizes)
    spec = replace(spec, target=replace(spec.target, cache_dtype=cache_dtype))
    plan, device = memory(spec, hardware.load("h200"))[0], torch.device("meta")

    def taken(num_slots: int) -> int:
        kept = rows_of(cache_dtype, torch.bfloat16)
        cache = StaticCache(num_layers=32, batch_size=4, capacity=num_slots, device=device, kept=kept)
        cache.make_buffers(range(32), device, num_heads=32, head_dim=128)
        return sum(layer.nbytes for layer in cache.in_rows())

    assert plan.target_cache_bytes == taken(spec.num_slots)
    assert plan.draft_cache_bytes == (taken(512 + 4 + 4) if "window" in draft else 0)


def test_two_ranks_send_the_sums_of_each_step() -> None:
    one, two = (
        CostModel(
            make_spec(
                "7B", num_ranks=2, free_draft="self", free_settings=SelfConfig(kind="self", layers=layers), **SPEC
            ),
            H100,
        ).collectives(3)[0]
        for layers in (1, 2)
    )
    assert two - one == 3 * 2
