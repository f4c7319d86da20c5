"""Memory per rank: each item, the verdict that follows from it, and weights as published and as loaded."""

from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from llama_ssp import catalogue
from llama_ssp.architectures.engine import BUCKET_STEP, ENGINE_KERNELS, MOST_GRAPHED_BUCKETS
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import WholeParts, split_model
from llama_ssp.catalogue import Dtype
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.models.prefill import Buckets
from llama_ssp.planning.memory import (
    GRAPH_NODE_BYTES,
    bucket_of,
    fits,
    kv_bytes_per_token,
    largest_batch,
    largest_context,
    memory,
)
from llama_ssp.planning.model import PlannedModel, expands_latents, planned_model
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.weights import model_bytes, shares
from llama_ssp.ranks.comms import Comm
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.weights.checkpoint import shape_of
from tests.helpers.extensions import module_of
from tests.helpers.models import module_runner, tiny_config, tiny_model
from tests.helpers.planning import make_spec, small_model

A100, MI250, CPU = (hardware.load(name) for name in ("p4d_24xlarge", "mi250", "laptop_cpu"))


def test_a_captured_round_holds_the_kernels_of_all_k_draft_steps() -> None:
    """13B and 7B have 40 and 32 layers; up to 200 slots are one width of the cache."""
    for prompt_tokens, num_short in (129, 0), (128, 5):
        spec = make_spec("13B", "7B", prompt_tokens=prompt_tokens)
        graphs = [memory(replace(spec, num_draft_tokens=k), A100)[0].graphs_bytes for k in (1, 4, 7)]
        layers = [(2 + num_short) * 40 + (k + num_short) * 32 for k in (1, 4, 7)]
        assert graphs == [number * ENGINE_KERNELS.layer * GRAPH_NODE_BYTES for number in layers]

    for own_sums, nodes in (False, ENGINE_KERNELS.layer + 4), (True, ENGINE_KERNELS.layer):
        rank, *_ = memory(make_spec("13B", num_ranks=2, own_sums=own_sums, prompt_tokens=129), A100)
        assert rank.graphs_bytes == 40 * nodes * GRAPH_NODE_BYTES, "two kernels of NCCL, and their events"


@pytest.mark.parametrize(("name", "kib"), [("7B", 512), ("13B", 800), ("30B", 1560), ("65B", 2560)])
def test_keys_and_values_of_a_token_have_the_published_size(name: str, kib: int) -> None:
    assert kv_bytes_per_token(planned_model(catalogue.load(name), device="cuda")) == kib * 1024


def test_caches_of_all_ranks_hold_every_slot_once() -> None:
    slots = 3 * 200  # 128 + 64 + 4 + 1, in steps of 8
    for draft_kind in (DraftLayout.one_rank, DraftLayout.sharded):
        ranks = memory(make_spec("30B", "7B", num_ranks=8, batch_size=3, draft_kind=draft_kind), A100)
        assert sum(rank.target_cache_bytes for rank in ranks) == slots * 1560 * 1024
        assert sum(rank.draft_cache_bytes for rank in ranks) == slots * 512 * 1024
        assert any(rank.draft_cache_bytes for rank in ranks[1:]) is (draft_kind is DraftLayout.sharded)


def test_a_cache_of_fewer_bits_has_its_own_bytes_and_room_to_unpack_a_layer_where_attention_needs_it() -> None:
    """Heads of 128 dimensions: 128 bytes and a scale. On a GPU prompts read a copy in fp16, made through fp32."""
    spec = make_spec("7B", prompt_tokens=2000)
    byte = make_spec("7B", prompt_tokens=2000, of_target={"cache_dtype": "int8"})
    (exact,), (packed,), (shorter,) = (
        memory(one_spec, A100) for one_spec in (spec, byte, replace(byte, prompt_tokens=1488))
    )
    assert packed.target_cache_bytes * 256 == exact.target_cache_bytes * 132
    assert packed.activations_bytes > exact.activations_bytes
    assert packed.activations_bytes - shorter.activations_bytes == 512 * 2 * 32 * 128 * (2 + 2)
    on_cpu, narrow = (
        make_spec("7B", prompt_tokens=2000, device="cpu", of_target={"cache_dtype": name}) for name in ("auto", "fp8")
    )
    (exact,), (packed,) = memory(on_cpu, CPU), memory(narrow, CPU)
    assert packed.target_cache_bytes * 512 == exact.target_cache_bytes * 132
    assert packed.activations_bytes == exact.activations_bytes


def test_weights_of_all_ranks_add_up_to_the_model_and_what_is_repeated() -> None:
    content = document(make_plan(make_spec("30B", num_ranks=8), A100))
    target, ranks = content["target"], content["memory"]
    assert target["weights_bytes"] == 2 * target["num_parameters"] == 2 * 32_528_943_616
    assert sum(rank["target_weights_bytes"] for rank in ranks) == target["weights_bytes"] + target["repeated_bytes"]
    assert target["repeated_bytes"] == 7 * ranks[0]["target_repeated_bytes"]


@pytest.mark.parametrize(
    ("kind", "copies"), [(DraftLayout.one_rank, 1), (DraftLayout.sharded, 1), (DraftLayout.replicated, 4)]
)
def test_a_draft_is_held_once_unless_it_is_replicated_but_for_norms_and_the_embedding_of_a_sharded_one(
    kind: DraftLayout, copies: int
) -> None:
    ranks = memory(make_spec("13B", "7B", num_ranks=4, draft_kind=kind, batch_size=4), A100)
    norms, embedding = 2 * (2 * 32 + 1) * 4096, 2 * 32000 * 4096
    repeated = norms + embedding * (kind is DraftLayout.sharded)
    assert ranks[0].draft_repeated_bytes == repeated
    assert sum(rank.draft_weights_bytes - rank.draft_repeated_bytes for rank in ranks) == copies * (
        13_476_831_232 - repeated
    )


@pytest.mark.parametrize(("form", "weight_bytes", "num_copies"), [("nf4", 9 / 16, 2), ("int4_weight_only", 17 / 32, 4)])
def test_quantizing_while_loading_needs_room_for_gate_and_up_and_what_is_read_ahead(
    form: str, weight_bytes: float, num_copies: int
) -> None:
    """In the last layer, before down, which is read ahead in 16 bits like the others; NF4 unpacks while it runs."""
    whole, packed = (memory(make_spec("7B", of_target={"quantization": name}), A100)[0] for name in ("none", form))
    beside = packed.loading_peak_bytes - packed.target_weights_bytes - A100.context_bytes
    assert beside == 11008 * 4096 * (2 * 2 + num_copies * 2 * weight_bytes + 2 - 3 * weight_bytes)
    unpacked_bytes = packed.activations_bytes - whole.activations_bytes
    assert form != "nf4" or unpacked_bytes == 2 * 2 * 11008 * 4096


def test_a_draft_is_loaded_when_all_copies_of_the_target_are_gone() -> None:
    (alone,), (pair,) = (memory(make_spec("7B", *draft), A100) for draft in ([], ["tinyllama_1B"]))
    draft_bytes = pair.draft_weights_bytes
    assert 0 <= pair.loading_peak_bytes - alone.target_weights_bytes - A100.context_bytes - draft_bytes < 2**25


@pytest.mark.parametrize(
    ("machine", "quantization", "dtype", "by_length"),
    [
        (A100, "none", Dtype.fp16, True),
        (A100, "int8_weight_only", Dtype.bf16, True),
        (A100, "int8", Dtype.fp16, False),
        (A100, "none", Dtype.fp32, False),
        (replace(A100, capability=7.5), "none", Dtype.fp16, False),
        (MI250, "none", Dtype.fp16, False),
    ],
)
def test_masks_are_planned_with_slots_and_graphs_of_their_own_where_attention_needs_them(
    machine: HardwareConfig, quantization: str, dtype: Dtype, by_length: bool
) -> None:
    """536 slots are three widths of the cache; 300 positions read two widths, with a mask for each query of a group."""
    of_target = {"quantization": quantization, "dtype": dtype}
    size = 4 if dtype is Dtype.fp32 else 2
    for name, units, num_kv_heads in ("7B", 11008, 32), ("llama3_8B", 14336, 8):
        spec = make_spec(name, prompt_tokens=300, max_new_tokens=230, of_target=of_target)
        (rank,), (two_rows,) = (memory(replace(spec, batch_size=rows), machine) for rows in (1, 2))
        assert rank.target_cache_bytes == 536 * 2 * 32 * num_kv_heads * 128 * size
        assert rank.graphs_bytes == (1 if by_length else 3) * 32 * ENGINE_KERNELS.layer * GRAPH_NODE_BYTES
        masks = 0 if by_length else 32 // num_kv_heads * 300 * 512 * (1 + size)
        assert two_rows.activations_bytes - rank.activations_bytes == 300 * (3 * 4096 + 3 * units) * size + masks


def test_long_contexts_are_planned_with_the_graphs_that_exist_at_a_time() -> None:
    """128k slots are 512 widths of the cache, of which the last ones read have graphs."""
    spec = make_spec("llama3_8B", prompt_tokens=128_000, of_target={"dtype": Dtype.fp32})
    (rank,) = memory(spec, A100)
    assert rank.graphs_bytes == MOST_GRAPHED_BUCKETS * 32 * ENGINE_KERNELS.layer * GRAPH_NODE_BYTES < 2**28


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("kind", "value_dim", "rank", "rotary", "positions", "is_expanded"),
    [
        ("deepseek_v3", 24, 16, 8, 1, False),
        ("deepseek_v2", 16, 16, 8, 512, False),
        ("deepseek_v3", 16, 64, 8, 512, True),
        ("deepseek_v2", 24, 64, 8, 512, True),
        ("deepseek_v3", 16, 16, 16, 512, False),
    ],
)
def test_what_latents_are_made_into_is_planned_as_torch_allocates_it(  # noqa: PLR0917 - a table
    kind: str, value_dim: int, rank: int, rotary: int, positions: int, is_expanded: bool
) -> None:
    """Scores of all heads, or keys and values, for 2048 slots, by far the most of what a forward allocates.

    Rotary keys of 16 numbers have the CPU's operator, which makes neither: masks are then the most.
    """
    sizes = {
        "v_head_dim": value_dim,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "head_dim": rotary,
        "max_position_embeddings": 4096,
    }
    module, num_slots, batch_size = tiny_model(kind, **sizes), 2048, 2
    module_of("modules.latents").use_latents(module)
    runner = module_runner(module)
    runner.allocate(batch_size=batch_size, capacity=num_slots, num_rolled_back=1)
    positions_BT = torch.arange(num_slots - positions, num_slots).repeat(batch_size, 1)
    scored_B1 = torch.full((batch_size, 1), positions - 1)
    rows_B = torch.arange(batch_size) if positions > 1 else None
    read = partial(
        runner.forward,
        positions_BT % 200,
        positions_BT,
        bucket=num_slots,
        score_positions_BR=scored_B1,
        cache_rows_B=rows_B,
    )
    with torch.inference_mode():
        read()  # makes the cache
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            read()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    most = max(accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))
    model = PlannedModel(
        name="mine", shape=shape_of(module.config), dtype=Dtype.fp32, quantization="none", by_library=True
    )
    assert expands_latents(model.shape, positions) == is_expanded
    prompt = num_slots - 8 if positions > 1 else 1
    spec = make_spec(
        model,
        device="cpu",
        cuda_graphs=False,
        batch_size=batch_size,
        prompt_tokens=prompt,
        max_new_tokens=num_slots - prompt - 1,
    )
    (planned,) = memory(spec, CPU)
    by_torch = positions > 1 and not model.has_latent_kernel(CPU)
    assert planned.activations_bytes == pytest.approx(most, rel=0.02 if by_torch else 0.1)


def test_every_part_of_a_row_has_its_own_sums_in_a_round() -> None:
    """A round of five positions over 256 slots or more, and prompts of four tokens, which need less."""
    spec = make_spec("7B", "7B", num_draft_tokens=4, prompt_tokens=4, max_new_tokens=250)
    one, two, four = (memory(replace(spec, batch_size=rows), A100)[0].activations_bytes for rows in (1, 2, 4))
    num_parts = 256 // 32
    assert four - two == 2 * (4 * 3 * 4096 * 2 + 5 * num_parts * 32 * (128 + 1) * 4)
    assert one == 8 * (3 * 4096 * 2 + num_parts * 32 * (128 + 1) * 4), "the prompt is read as one of 8 tokens"


def test_the_largest_batch_and_context_fit_and_one_more_does_not() -> None:
    spec = make_spec("13B", "7B", num_ranks=2)
    batch = largest_batch(spec, A100)
    assert fits(replace(spec, batch_size=batch), A100)
    assert not fits(replace(spec, batch_size=batch + 1), A100)
    crowded = replace(spec, batch_size=batch)
    context = largest_context(crowded, A100)
    assert fits(replace(crowded, prompt_tokens=context - 64), A100)
    assert not fits(replace(crowded, prompt_tokens=context - 63), A100)
    assert largest_batch(make_spec("65B"), A100) == largest_context(make_spec("65B"), A100) == 0
    longer = make_spec("qwen2.5_7B", "qwen2.5_0.5B", num_ranks=4)
    apart = replace(longer, draft_kind=DraftLayout.own_gpu, draft_ranks=(4,), overlap=True)
    for each in (longer, apart):
        assert largest_context(each, A100) == 131072, "rows that outgrow the draft's context go on plainly"


def test_logits_lie_where_the_target_is_and_probabilities_where_the_rule_runs_or_the_draft_is() -> None:
    spec = make_spec("13B", "7B", batch_size=3, num_ranks=2, draft_ranks=(2,), draft_kind=DraftLayout.own_gpu)
    numbers = 3 * spec.target.shape.vocab_size
    logits = 5 * (2 * 2 + 4)
    drawn = 2 * 8 * 3 * (spec.max_new_tokens + 1) * (3 * 4 + 4)
    verify_rank, other, draft = (rank.logits_bytes - drawn for rank in memory(spec, A100))
    assert (verify_rank, other, draft) == (numbers * (logits + 4 * 5 + 4 * 4 + 8), numbers * logits, numbers * 4 * 4)
    by_block, *others = (rank.logits_bytes - drawn for rank in memory(replace(spec, rule="block"), A100))
    assert (by_block, *others) == (verify_rank + numbers * 4 * 5, other, draft)
    in_flight, *others = (rank.logits_bytes - drawn for rank in memory(replace(spec, overlap=True), A100))
    assert (in_flight, *others) == (verify_rank + numbers * 4 * 5, other, draft), "of the next block, which arrive"


def test_ranks_that_talk_to_each_other_have_buffers_for_it_while_loading_and_while_running() -> None:
    spec = make_spec("7B")
    (alone,), (copy, second) = memory(spec, A100), memory(replace(spec, num_replicas=2), A100)
    assert second == replace(copy, rank=1)
    assert (alone.collectives_bytes, copy.collectives_bytes) == (0, A100.collective_bytes)
    assert copy.total_bytes - alone.total_bytes == A100.collective_bytes > 0
    assert copy.loading_peak_bytes - alone.loading_peak_bytes == A100.collective_bytes
    apart = make_spec("7B", "7B", num_ranks=2, draft_ranks=(2,), draft_kind=DraftLayout.own_gpu)
    assert [rank.collectives_bytes // A100.collective_bytes for rank in memory(apart, A100)] == [2, 2, 1]


@pytest.mark.parametrize("num_tokens", [1, 255, 256, 257, 300, 310])
def test_a_forward_reads_the_slots_that_the_loop_lets_it_read(num_tokens: int) -> None:
    buckets = Buckets(step=BUCKET_STEP["cuda"], num_slots=310)
    assert bucket_of(num_tokens, 310, A100) == buckets.covering(num_tokens)


def test_a_package_that_a_cpu_needs_for_its_kernel_is_counted_once() -> None:
    """Measured in a run of `tiny`: 427 MB, where 340 were planned."""
    for device, machine in (("cpu", CPU), ("cuda", A100)):
        for quantization in ("none", "int8_weight_only", "nf4", "fp4"):
            given = {"quantization": quantization}
            (held,) = memory(make_spec("7B", "7B", device=device, of_target=given, of_draft=given), machine)
            more = 90_000_000 if quantization in ("nf4", "fp4") and device == "cpu" else 0
            assert held.context_bytes == machine.context_bytes + more


INT8_GB = {"7B": 7.006, "13B": 13.352, "30B": 32.972, "65B": 65.838}


@pytest.mark.parametrize("name", INT8_GB)
def test_int8_has_the_published_size_and_every_rank_has_the_row_scales(name: str) -> None:
    shape = catalogue.load(name).shape
    assert shape
    plain, packed = (
        PlannedModel(name=name, shape=shape, dtype=Dtype.fp16, quantization=form) for form in ("none", "int8")
    )
    held = [model_bytes(share, packed, device="cuda") for share in shares(shape, num_ranks=8)]
    once = sum(share.sharded_bytes for share in held) + held[0].repeated_bytes
    assert once / 1e9 == pytest.approx(INT8_GB[name], rel=2e-3)
    row_parallel_rows = 2 * shape.hidden_size * shape.num_hidden_layers
    whole = model_bytes(shares(shape, num_ranks=8)[0], plain, device="cuda")
    assert {share.repeated_bytes - whole.repeated_bytes for share in held} == {4 * row_parallel_rows}


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt_neo", "phi", "gemma", "gemma2", "gemma3_text")
CONFIGS = {name: tiny_config(name) for name in FAMILIES} | {
    "llama, tied": tiny_config("llama", tie_word_embeddings=True),
    "gpt_neo, untied": tiny_config("gpt_neo", tie_word_embeddings=False),
}


@pytest.mark.parametrize(
    ("num_ranks", "whole"),
    [*((number, WholeParts.none) for number in (1, 2, 3)), (2, WholeParts.embedding), (2, WholeParts.attention)],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_rank_is_planned_exactly_what_the_loader_gives_it(name: str, num_ranks: int, whole: WholeParts) -> None:
    shape = shape_of(CONFIGS[name])
    planned = PlannedModel(name=name, shape=shape, dtype=Dtype.bf16, quantization="none")
    for rank, share in enumerate(shares(shape, num_ranks=num_ranks, whole=whole)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIGS[name])
        own = split_model(shape, num_ranks=num_ranks, whole=whole)[rank]
        cut = module_of("modules.tensor_parallel").shard
        cut(model, shape, Comm(rank=rank, size=num_ranks), own=own, whole=whole)
        if shape.tie_word_embeddings and model.lm_head.weight.shape == model.get_input_embeddings().weight.shape:
            model.lm_head.weight = model.get_input_embeddings().weight
        held = 2 * sum(parameter.numel() for parameter in model.parameters())
        assert held == model_bytes(share, planned, device="cuda").total_bytes


def test_halved_matrices_are_kept_in_whole_blocks_of_inputs() -> None:
    def matrices_bytes(hidden_size: int) -> int:
        sizes = small_model(hidden_size=hidden_size, intermediate_size=1024, vocab_size=4096)
        model = replace(sizes, dtype=Dtype.fp32, stored=Dtype.fp16)
        held = inventory(model.shape)
        halved = model_bytes(held, model, device="cpu").total_bytes
        beside = 4 * (4096 * hidden_size + held.num_layers * held.layer_vectors + held.final_vectors)
        return halved - beside

    # 64 columns for o_proj; hidden_size for q, k, v, gate, up and the head; 1024 for down.
    def kept(hidden_size: int, *, columns: int, of_output: int) -> int:
        layer = hidden_size * of_output + columns * (64 + 32 + 32 + 2 * 1024) + hidden_size * 1024
        return 2 * (2 * layer + columns * 4096)

    assert matrices_bytes(256) == kept(256, columns=256, of_output=64)
    # No whole blocks of 16: FBGEMM's kernel keeps blocks of 512 inputs.
    assert matrices_bytes(264) == kept(264, columns=512, of_output=512)


def test_attention_of_equal_bits_keeps_the_sums_of_as_many_groups_as_fit() -> None:
    """64 MiB at the most."""
    plain, equal = (
        [
            memory(make_spec("llama3_8B", prompt_tokens=number, equal_bits=is_equal), A100)[0].activations_bytes
            for number in (100, 4000)
        ]
        for is_equal in (False, True)
    )
    assert equal[0] < plain[0]
    assert 0.8 * 2**26 < equal[1] - plain[1] <= 2**26
