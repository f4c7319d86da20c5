"""What a plan of a target that drafts for itself counts: steps of its layers, and a small cache."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from llama_ssp import catalogue
from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.modules.building import layers_of
from llama_ssp.extensions.self_drafts.drafter import SelfDrafter
from llama_ssp.extensions.self_drafts.lengths import gains_from
from llama_ssp.extensions.self_drafts.records import SelfConfig
from llama_ssp.machines import hardware
from llama_ssp.models.cache import StaticCache
from llama_ssp.models.graph_inputs import find_parts, find_tensors
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import Precision
from llama_ssp.models.weights import Loading
from llama_ssp.planning.memory import memory
from llama_ssp.planning.plan import make_plan
from llama_ssp.planning.spec import make_spec as spec_of_run
from llama_ssp.planning.timing import CostModel, timing
from llama_ssp.ranks.stages import ModelStage
from llama_ssp.settings.trees import tree_shape
from llama_ssp.storage.formats import OWN_DTYPE
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.in_memory import WeightsInMemory
from tests.helpers.composed import compose_run
from tests.helpers.decoders import parts_of
from tests.helpers.held import held_bytes
from tests.helpers.models import build_checkpoint
from tests.helpers.planning import make_spec, small_model

H100 = hardware.load("h100")
SAID_OF_LONG_TEXTS = (
    "model.cache_dtype=int8 . ms/token in place of . plain, and room for . rows, or rows of . tokens, draft=self "
    "draft.window=512 a gain from an acceptance of . on and draft=self draft.layers=16 a gain"
)
SIZES_OF_7B = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
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


@pytest.fixture(scope="module")
def on_meta() -> WeightsInMemory:
    """Weights of 7B, of no values."""
    shape = catalogue.load("7B").shape
    assert shape
    config = LlamaConfig(**{name: getattr(shape, name) for name in SIZES_OF_7B})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = dict(model.named_parameters())
    return WeightsInMemory(
        name="7B", folder=Path("7B"), config=config, shape=shape, parameters=parameters, generation={}
    )


@pytest.mark.parametrize("cache_dtype", [OWN_DTYPE, "int8"])
@pytest.mark.parametrize("draft", [None, {"layers": 8}, {"window": 511}])
def test_bytes_at_32k_are_those_that_a_run_takes(
    draft: dict[str, Any] | None, cache_dtype: str, on_meta: WeightsInMemory
) -> None:
    """Of 7B on one H200, by the runner and the drafter of a run, on no device."""
    sizes = {**SPEC, "prompt_tokens": 32_000, "batch_size": 4}
    settings = SelfConfig(kind="self", **draft) if draft else None
    spec = make_spec("7B", free_draft="self" if draft else None, free_settings=settings, **sizes)
    spec = replace(spec, target=replace(spec.target, cache_dtype=cache_dtype))
    plan, device = memory(spec, hardware.load("h200"))[0], torch.device("meta")
    loading = Loading(on_meta, device=device, dtype=torch.bfloat16, precision=Precision(cache_dtype=cache_dtype))
    target = LeanRunner(loading)
    held, _ = find_tensors([target], bucket=0)  # also matrices the other way round, of the same memory
    weights_bytes = sum(leaf.nbytes for leaf in held if isinstance(leaf, Tensor) and leaf.is_contiguous())
    assert weights_bytes == pytest.approx(plan.target_weights_bytes, rel=1e-5)
    target.allocate(batch_size=4, capacity=spec.num_slots)
    target.make_buffers(target.cache, range(32))
    caches: dict[str, list[StaticCache]] = {"target": [target.cache], "draft": []}
    if settings:
        sizes = {"vocab_size": target.vocab_size, "num_draft_tokens": spec.num_draft_tokens}
        drafter = SelfDrafter(parts_of(target=target, config=settings, **sizes))
        drafter.allocate(batch_size=4, num_slots=spec.num_slots)
        found = find_parts(drafter, StaticCache, seen=set())
        caches["draft"] = [cache for cache in found if cache is not target.cache]
    taken = {
        name: sum(layer.nbytes for cache in of_model for layer in cache.in_rows()) for name, of_model in caches.items()
    }
    assert taken == {"target": plan.target_cache_bytes, "draft": plan.draft_cache_bytes}
    assert bool(taken["draft"]) == bool(draft and "window" in draft)


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


def test_a_second_copy_takes_the_weights_of_its_layers_and_a_step_reads_these() -> None:
    none, copied, some = (
        costs(layers=32),
        costs(quantization="int8_weight_only"),
        costs(quantization="int8_weight_only", layers=16),
    )
    plans = [memory(each.spec, H100)[0] for each in (none, copied, some)]
    of_layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert plans[0].draft_weights_bytes == 0
    assert plans[1].draft_weights_bytes == pytest.approx(32 * of_layer, rel=0.01)
    assert plans[2].draft_weights_bytes == pytest.approx(16 * of_layer, rel=0.01)
    assert [plan.draft_cache_bytes for plan in plans] == [0, 0, 0]
    assert copied.drafting_s(3) < none.drafting_s(3)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_bytes_of_a_second_copy_are_those_that_are_loaded(family: str, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, family, num_hidden_layers=4, head_dim=8, vocab_size=320)
    name, origin = "int8_weight_only", inspect(tmp_path)
    stage, how = ModelStage(number=1, num_stages=3, layers=range(3)), Precision(quantization=name)
    copied: Any = load_model(Loading(origin, stage=stage, precision=how, dtype=torch.float32))
    layers = copied._layers if family == "llama" else layers_of(copied._model)[1]
    target = replace(small_model(), shape=origin.shape, dtype=Dtype.fp32)
    draft = SelfConfig(kind="self", layers=3, quantization=name)
    spec = make_spec(target, device="cpu", free_draft="self", free_settings=draft, cuda_graphs=False)
    assert memory(spec, replace(H100, device="cpu"))[0].draft_weights_bytes == pytest.approx(
        held_bytes(layers), rel=0.02
    )


@pytest.mark.parametrize(
    ("prompt", "draft", "said", "unsaid"),
    [
        (30_000, None, SAID_OF_LONG_TEXTS, ""),
        (30_000, "llama3_1B", "keys and values: model.cache_dtype=int8 .", "draft=self"),
        (500, None, "", "keys and values"),
    ],
)
def test_a_plan_of_long_texts_says_what_gains(prompt: int, draft: str | None, said: str, unsaid: str) -> None:
    spec = make_spec("llama3_8B", draft, batch_size=16, prompt_tokens=prompt, max_new_tokens=500)
    notes = " | ".join(make_plan(spec, H100).notes)
    assert re.search(re.escape(said).replace(r"\ \.", r"\ [0-9.]+"), notes), notes
    assert not unsaid or unsaid not in notes


def test_the_acceptance_that_a_note_names_is_where_a_draft_begins_to_gain() -> None:
    spec = make_spec("llama3_8B", batch_size=16, prompt_tokens=30_000, max_new_tokens=500)
    least = gains_from(spec, H100, timing(spec, H100).plain_s, window=512)
    assert least
    drafts = replace(spec, free_draft="self", free_settings=SelfConfig(kind="self", window=512), num_draft_tokens=4)
    below, above = (
        min(timing(replace(drafts, acceptance=least + apart), H100).by_num_draft_tokens) for apart in (-0.05, 0.02)
    )
    assert above < timing(spec, H100).plain_s < below
