"""Times: against published tables, and what each piece of the sum must do."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published import OTHER_ENGINES
from llama_ssp.architectures.family import inventory
from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.acceptance import tree_tokens
from llama_ssp.planning.memory import kv_bytes_per_token, model_bytes, step_bytes
from llama_ssp.planning.spec import PlannedModel, planned_model
from llama_ssp.planning.timing import OPERATORS_PER_LAYER, CostModel, ForwardTime, bandwidth, round_messages, timing
from llama_ssp.settings import catalogue
from llama_ssp.settings.layout import ENGINE_KERNELS
from llama_ssp.settings.schema import DraftLayout, Dtype, TargetKind
from llama_ssp.settings.trees import tree_shape
from tests.helpers.planning import make_job, measured_machine, small_model

A100 = hardware.load("8xa100_80gb")


@pytest.mark.parametrize(("num_gpus", "tokens_per_s"), [(2, 21.3), (4, 38.0), (8, 62.5)])
def test_published_70b_rows_of_gpt_fast_are_forecast_within_a_fifth(num_gpus: int, tokens_per_s: float) -> None:
    job = make_job("llama2_70B", num_ranks=num_gpus, prompt_tokens=5, max_new_tokens=200)
    job = replace(job, kernels=OTHER_ENGINES)
    assert 1 / timing(job, A100).plain_s == pytest.approx(tokens_per_s, rel=0.2)


@pytest.mark.parametrize(
    ("num_gpus", "kind", "ratio"),
    [
        (2, DraftLayout.sharded, 0.126), (4, DraftLayout.sharded, 0.150), (8, DraftLayout.sharded, 0.190),
        (4, DraftLayout.one_rank, 0.36), (8, DraftLayout.one_rank, 0.60),
    ],
)  # fmt: skip
def test_where_the_draft_sits_decides_the_published_cost_ratio(num_gpus: int, kind: DraftLayout, ratio: float) -> None:
    job = make_job("llama2_70B", "llama2_7B", num_ranks=num_gpus, draft_kind=kind)
    job = replace(job, kernels=OTHER_ENGINES)
    assert timing(job, A100).cost_ratio == pytest.approx(ratio, rel=0.1)


def test_13b_with_7b_is_forecast_within_15_percent_of_what_was_published() -> None:
    job = replace(make_job("llama2_13B", "llama2_7B", acceptance=None), kernels=OTHER_ENGINES)
    speedup = timing(job, A100).speedup
    assert speedup
    assert 31.9 / speedup == pytest.approx(27.8, rel=0.15)


def test_a_round_is_k_draft_steps_a_verification_and_the_rest() -> None:
    job = make_job("13B", "7B", num_ranks=2)
    timed, clock = timing(job, A100), CostModel(job, A100)
    assert timed.verify_forward
    assert timed.verify_s
    assert timed.other_s is not None
    assert timed.round_s
    drafting = clock.draft_step_s(2) + 3 * clock.draft_step_s(1)
    assert timed.round_s == pytest.approx(drafting + timed.verify_s + timed.other_s)
    assert timed.verify_s == pytest.approx(timed.verify_forward.total_s + clock.verdict_s(4))
    assert timed.speculative_s == pytest.approx(timed.round_s / 3.3616)


@pytest.mark.parametrize("machine", [A100, "measured"], ids=["described", "measured"])
def test_judging_a_draft_as_a_whole_takes_kernels_and_passes_of_its_own(machine: HardwareConfig | str) -> None:
    machine = machine if isinstance(machine, HardwareConfig) else measured_machine(A100)
    job = make_job("7B", "tinyllama_1B") if machine is A100 else make_job(small_model(), "tiny-draft")
    by_block = replace(job, rule="block")
    plain_s, block_s = (CostModel(each, machine).rule_s(5) for each in (job, by_block))
    passes_s = 8 * 4 * 5 * job.target.shape.vocab_size / bandwidth(machine)
    assert block_s - plain_s == pytest.approx(12 * machine.kernel_s + passes_s)
    assert timing(by_block, machine).plain_s == timing(job, machine).plain_s


def test_the_best_k_is_where_the_time_per_token_is_least() -> None:
    timed = timing(make_job("65B", "7B", num_ranks=8, draft_kind=DraftLayout.sharded, acceptance=0.9), A100)
    assert timed.best_num_draft_tokens
    assert timed.by_num_draft_tokens[timed.best_num_draft_tokens - 1] == min(timed.by_num_draft_tokens)
    assert timing(make_job("13B", "7B", acceptance=0.0), A100).best_num_draft_tokens == 1


def test_a_completion_pays_for_its_prompt_too() -> None:
    timed = timing(make_job("7B", prompt_tokens=1024, max_new_tokens=16), A100)
    assert timed.plain_run_s == pytest.approx((timed.prefill_s + 15 * timed.plain_s) / 16)


def test_a_prompt_is_read_by_the_target_and_by_the_draft() -> None:
    pair, target, draft = (timing(job, A100) for job in (make_job("13B", "7B"), make_job("13B"), make_job("7B")))
    assert pair.prefill_s == pytest.approx(target.prefill_s + draft.prefill_s, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "quantization", "is_packed"),
    [("cuda", "none", True), ("cuda", "int8_weight_only", True), ("cuda", "int8", False), ("cpu", "none", False)],
)
def test_packed_prompts_take_the_time_of_their_mean_length(device: str, quantization: str, is_packed: bool) -> None:
    machine = hardware.load("8xa100_80gb" if device == "cuda" else "laptop_cpu")
    job = make_job(small_model(quantization=quantization), device=device, prompt_tokens=512 if is_packed else 1536)
    ragged = replace(job, prompt_tokens=1536, mean_prompt_tokens=512.0)
    assert timing(ragged, machine).prefill_s == timing(job, machine).prefill_s


def test_the_length_limit_cuts_last_rounds_so_that_whole_rounds_are_paid() -> None:
    """All drafts accepted, four tokens a round: 61 to 64 tokens behind the prompt's own take 16 rounds each."""
    rounds = []
    for num_tokens in range(62, 66):
        timed = timing(make_job("13B", "7B", num_draft_tokens=3, acceptance=1.0, max_new_tokens=num_tokens), A100)
        assert timed.speculative_run_s
        assert timed.round_s
        rounds.append((timed.speculative_run_s * num_tokens - timed.prefill_s) / timed.round_s)
    assert sum(rounds) / 4 == pytest.approx(16)


def test_decoding_is_priced_in_the_middle_of_a_completion() -> None:
    """128 tokens of the prompt and half of 2048 new ones are within 5 steps of 256 slots."""
    job = make_job("7B", prompt_tokens=128, max_new_tokens=2048)
    cache_bytes = 5 * 256 * kv_bytes_per_token(job.target)
    assert timing(job, A100).target_forward.attention_s == pytest.approx(cache_bytes / bandwidth(A100))


def test_a_cache_of_fewer_bits_is_read_sooner_but_on_a_measured_cpu_at_most_twice_as_fast() -> None:
    """Heads of 128 dimensions have 132 bytes in int8, with their scale, of 256 in fp16."""

    def attention_s(cache_dtype: str, machine: HardwareConfig) -> float:
        job = make_job("7B", prompt_tokens=2048)
        job = replace(job, target=replace(job.target, cache_dtype=cache_dtype))
        return timing(job, machine).target_forward.attention_s

    exact, byte = (attention_s(name, A100) for name in ("auto", "int8"))
    assert byte / exact == pytest.approx(132 / 256)
    machine = measured_machine(A100)
    exact, half, byte = (attention_s(name, machine) for name in ("auto", "bf16", "int8"))
    assert half == exact  # the model's own 16 bits
    assert byte / exact == pytest.approx(132 / 256)
    small = replace(planned_model(catalogue.load("tiny"), device="cpu"), dtype=Dtype.fp32)
    cpu = measured_machine(hardware.load("laptop_cpu"))
    on_cpu = [
        timing(
            make_job(replace(small, cache_dtype=name), prompt_tokens=1024, device="cpu"), cpu
        ).target_forward.attention_s
        for name in ("auto", "fp16", "int8")
    ]
    assert on_cpu[1] / on_cpu[0] == pytest.approx(0.5)
    assert on_cpu[2] == pytest.approx(on_cpu[1])


def test_ranks_with_a_draft_each_draft_and_judge_their_share_of_the_rows() -> None:
    shared = make_job("13B", "7B", num_ranks=4, draft_kind=DraftLayout.replicated, batch_size=8)
    alone = make_job("13B", "7B", batch_size=2)
    assert timing(shared, A100).draft_forward_s == pytest.approx(timing(alone, A100).draft_forward_s)
    joint, share = CostModel(shared, A100), CostModel(alone, A100)
    assert joint.draft
    assert share.draft
    assert joint.prefill_s(joint.draft) == pytest.approx(share.prefill_s(share.draft))
    assert joint.rule_s(5) == pytest.approx(share.rule_s(5))


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_each_rank_that_drafts_tells_the_others_its_verdict(num_draft_tokens: int) -> None:
    job = make_job("13B", "7B", num_ranks=4, draft_kind=DraftLayout.replicated, batch_size=6)
    clock, messages = CostModel(job, A100), round_messages(job, num_draft_tokens)
    assert messages["verdict"].num_senders == 4
    told_s = clock.agree_s(num_draft_tokens, *messages)
    assert clock.verdict_s(num_draft_tokens) == pytest.approx(told_s + clock.rule_s(num_draft_tokens + 1), rel=1e-12)


def test_without_a_draft_one_rank_draws_for_all_rows() -> None:
    shared = make_job("13B", "7B", num_ranks=4, draft_kind=DraftLayout.replicated, batch_size=8)
    clock, alone = CostModel(shared, A100), CostModel(make_job("13B", num_ranks=4, batch_size=8), A100)
    assert clock.draw_s(clock.target) == pytest.approx(alone.draw_s(alone.target))


def test_a_draft_scores_its_last_token_alone() -> None:
    clock = CostModel(make_job("13B", "7B"), replace(A100, flops_per_s={"fp16": 1e9}, flops_share=1.0))
    assert clock.draft
    one_s, two_s = (clock.forward(clock.draft, num_positions).matrices_s for num_positions in (1, 2))
    assert 2 * one_s - two_s == pytest.approx(2 * 32000 * 4096 / 1e9, rel=1e-6)


def test_int8_of_bitsandbytes_is_slower_than_fp16_and_weight_only_int8_is_faster() -> None:
    job = make_job("7B")

    def plain_s(quantization: str) -> float:
        return timing(replace(job, target=replace(job.target, quantization=quantization)), A100).plain_s

    assert plain_s("int8") > 3 * plain_s("none")
    assert plain_s("int8_weight_only") < 0.7 * plain_s("none")


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int8_weight_only", 8), ("int4_weight_only", 4.25)])
def test_a_cpu_reads_packed_weights_once(quantization: str, bits: float) -> None:
    job, machine = make_job("7B"), hardware.load("laptop_cpu")
    packed_s = timing(replace(job, target=replace(job.target, quantization=quantization)), machine).plain_s
    num_weights = 32 * sum(matrix.num_elements for matrix in inventory(job.target.shape).layer)
    assert 1 < packed_s / (num_weights * bits / 8 / bandwidth(machine)) < 1.3


def test_a_measured_profile_takes_the_place_of_data_sheets() -> None:
    machine = measured_machine(A100)
    model = small_model()
    layer = 64 * (64 + 32 + 32 + 64 + 3 * 192)
    elements = 2 * layer + 320 * 64
    plain = timing(make_job(model, cuda_graphs=False), machine)
    assert plain.target_forward.matrices_s == pytest.approx(elements / 1e6)
    assert plain.target_forward.operators_s == pytest.approx(2 * 10.0 + 3.0)
    assert plain.plain_s == pytest.approx(elements / 1e6 + 23.0 + 0.5 + 0.25)


def test_a_tied_head_has_a_price_of_its_own() -> None:
    machine = measured_machine(A100)
    model = small_model()
    tied = replace(model, shape=replace(model.shape, tie_word_embeddings=True))

    def matrices_s(chosen: PlannedModel) -> float:
        return timing(make_job(chosen, cuda_graphs=False), machine).target_forward.matrices_s

    assert matrices_s(tied) - matrices_s(model) == pytest.approx(320 * 64 / 1e6)


def test_operators_are_read_between_measured_rows_and_widths() -> None:
    machine = measured_machine(A100)
    (profile,) = machine.profiles
    wide = [replace(point, width=128, s=3 * point.s) for point in profile.layer]
    wider = replace(machine, profiles=[replace(profile, layer=[*profile.layer, *wide])])
    model = small_model(hidden_size=96, head_dim=12)
    timed = timing(make_job(model, "7B", cuda_graphs=False, num_draft_tokens=2), wider)
    assert timed.target_forward.operators_s == pytest.approx(2 * 20.0 + 3.0)
    assert timed.verify_forward
    assert timed.verify_forward.operators_s == pytest.approx(2 * 24.0 + 3.0)


def _whole(machine: HardwareConfig, **constants: float) -> HardwareConfig:
    (profile,) = machine.profiles
    return replace(machine, profiles=[replace(profile, **constants)])  # type: ignore[arg-type]


def test_every_part_of_a_forward_is_scaled_by_what_whole_forwards_took() -> None:
    machine, job = measured_machine(A100), make_job(small_model(), "7B", cuda_graphs=False, num_ranks=2)
    bare, whole = timing(job, machine), timing(job, _whole(machine, forward_ratio=2.0, first_draft_s=0.25))
    assert bare.verify_forward
    assert bare.verify_forward.collectives_s > 0
    assert whole.target_forward == bare.target_forward.scaled(2.0)
    assert whole.verify_forward == bare.verify_forward.scaled(2.0)
    assert whole.target_forward.total_s == pytest.approx(2.0 * bare.target_forward.total_s)
    assert whole.plain_s - whole.target_forward.total_s == pytest.approx(bare.plain_s - bare.target_forward.total_s)


@pytest.mark.parametrize(("target", "draft", "ratio"), [((0, 1), 0, 2.0), ((0,), 1, 3.0), ((0, 1), 2, 3.0)])
def test_a_draft_is_corrected_by_what_the_other_ranks_do_meanwhile(
    target: tuple[int, ...], draft: int, ratio: float
) -> None:
    """They wait where it is on a rank of the target; on a rank of its own they may work."""
    bare, job = measured_machine(A100), make_job(small_model(), "7B", cuda_graphs=False)
    job = replace(job, target_ranks=target, draft_ranks=(draft,))
    corrected = _whole(bare, forward_ratio=2.0, forward_ratio_apart=3.0)
    steps_s = [CostModel(job, each).draft_step_s(1) - 0.5 for each in (bare, corrected)]
    assert steps_s[1] == pytest.approx(ratio * steps_s[0])


def test_scaling_a_forward_leaves_out_what_it_reads_from_elsewhere() -> None:
    parts = ForwardTime(matrices_s=1.0, attention_s=2.0, operators_s=4.0, collectives_s=8.0, offload_s=16.0)
    doubled = ForwardTime(matrices_s=2.0, attention_s=4.0, operators_s=8.0, collectives_s=16.0, offload_s=16.0)
    assert parts.scaled(2.0) == doubled


def test_layer_wise_placement_is_forecast_on_a_measured_machine_too() -> None:
    model, machine = small_model(num_hidden_layers=3), measured_machine(A100)
    one = timing(make_job(model, cuda_graphs=False), machine).target_forward
    row = make_job(model, num_ranks=3, target_kind=TargetKind.accelerate, cuda_graphs=False)
    assert timing(row, machine).target_forward.matrices_s == pytest.approx(one.matrices_s)


VOCABULARY, ROWS, K = 32000, 3, 4
ID = 8
ONE_RANK, SHARDED, REPLICATED, OWN_GPU = DraftLayout


@pytest.mark.parametrize(
    ("kind", "target", "draft", "arriving"),
    [
        (ONE_RANK, [0], [0], [0, 0, 0]),
        (ONE_RANK, [0, 1], [1], [ID * ROWS * K, 0, 3 * ID * ROWS]),
        (SHARDED, [0, 1], [0, 1], [ID * ROWS * K, 0, 3 * ID * ROWS]),
        (SHARDED, [0, 1, 2], [0, 1], [2 * ID * ROWS * K, 0, 2 * 3 * ID * ROWS]),
        (REPLICATED, [0, 1], [0, 1], [2 * ID * 2 * K, 0, 2 * 3 * ID * 2]),
        (OWN_GPU, [0, 1], [2], [2 * ID * ROWS * K, 4 * ROWS * K * VOCABULARY, 2 * 3 * ID * ROWS]),
        (OWN_GPU, [0], [1, 2], [2 * ID * ROWS * K, 4 * ROWS * K * VOCABULARY, 2 * 3 * ID * ROWS]),
    ],
)
def test_the_bytes_of_a_round_follow_from_the_placement(
    kind: DraftLayout, target: list[int], draft: list[int], arriving: list[int]
) -> None:
    """Ids, probabilities, verdict."""
    job = replace(
        make_job("13B", "7B", num_draft_tokens=K, batch_size=ROWS),
        draft_kind=kind, target_ranks=tuple(target), draft_ranks=tuple(draft),
    )  # fmt: skip
    found = round_messages(job, K)
    kinds = ("ids", "probabilities", "verdict")
    assert [found[kind].received_bytes if kind in found else 0 for kind in kinds] == arriving


def test_greedy_drafts_need_no_probabilities_elsewhere() -> None:
    job = replace(make_job("13B", "7B"), draft_kind=OWN_GPU, draft_ranks=(1,), rule="greedy")
    assert "probabilities" not in round_messages(job, K)


def test_a_plain_token_has_the_verdict_alone() -> None:
    job = make_job("13B", "7B", num_ranks=2, draft_kind=SHARDED)
    assert [*round_messages(job, 0)] == ["verdict"]


def test_a_tree_by_look_up_costs_its_verification_alone_and_its_verdict_names_a_path() -> None:
    plain, tree = make_job("13B", num_ranks=2, num_draft_tokens=9), tree_shape("3x1x1")
    chain, job = (replace(plain, free_draft="ngram", tree=each) for each in (None, tree))
    timed, clock = timing(job, A100), CostModel(job, A100)
    assert timed.round_s == pytest.approx(clock.forward(clock.target, 10).total_s + clock.verdict_s(9))
    assert timed.tokens_per_round == tree_tokens(0.8, tree)
    sizes = [round_messages(each, 9)["verdict"].payload_bytes for each in (chain, job)]
    assert sizes[1] - sizes[0] == ID * tree.depth
    assert round_messages(job, 0) == round_messages(plain, 0)


def test_the_physical_limit_is_a_copy_of_what_a_step_reads_and_its_shares_follow() -> None:
    """13B in fp16: all weights but the embedding's rows, and keys and values of 100 tokens."""
    machine = replace(A100, copy_bytes_per_s=1e12, bandwidth_bytes_per_s=2e12)
    job = make_job("13B", prompt_tokens=90, max_new_tokens=20)
    shape = job.target.shape
    embedding = 2 * shape.vocab_size * shape.hidden_size
    read = model_bytes(inventory(shape), job.target, device="cuda").total_bytes - embedding
    read += 100 * kv_bytes_per_token(job.target)
    timed = timing(job, machine)
    assert timed.copy_share * timed.plain_s == pytest.approx(read / 1e12)
    assert timed.limit_share == pytest.approx(timed.copy_share / 2)


def test_fewer_kernels_bring_decoding_nearer_to_the_speed_of_a_copy() -> None:
    """Each takes its time in each of the 32 layers."""
    h200 = hardware.load("1xh200")
    job = make_job("7B", prompt_tokens=512, max_new_tokens=128)
    twelve, eight = (timing(replace(job, kernels=replace(ENGINE_KERNELS, layer=number)), h200) for number in (12, 8))
    assert twelve.plain_s - eight.plain_s == pytest.approx(4 * 32 * h200.kernel_s)
    assert eight.copy_share > twelve.copy_share


def test_layer_wise_placement_has_the_physical_limit_of_one_gpu() -> None:
    one = timing(make_job("13B", num_ranks=1), A100).limit_share
    row = timing(make_job("13B", num_ranks=4, target_kind=TargetKind.accelerate), A100).limit_share
    assert row == pytest.approx(one, rel=0.01)


MACHINES = [hardware.load(name) for name in sorted(hardware.names()) if not hardware.load(name).profiles]
MODELS = [entry.name for entry in catalogue.entries() if entry.shape and not entry.shape.is_head]


@given(
    target=st.sampled_from(MODELS), machine=st.sampled_from(MACHINES), power=st.integers(0, 3),
    prompt_tokens=st.integers(1, 40_000), batch_size=st.integers(1, 64),
)  # fmt: skip
@settings(deadline=None, max_examples=100)
def test_no_first_token_comes_before_the_devices_could_compute_or_read_it(
    target: str, machine: HardwareConfig, power: int, prompt_tokens: int, batch_size: int
) -> None:
    """At the data sheet's rates, over all ranks: every matrix for each position, and each pair of positions twice."""
    num_ranks = min(2**power, machine.num_gpus)
    job = make_job(
        target, num_ranks=num_ranks, prompt_tokens=prompt_tokens, batch_size=batch_size, device=machine.device,
        cuda_graphs=machine.device == "cuda",
    )  # fmt: skip
    model, held = job.target, inventory(job.target.shape)
    shape, rate = model.shape, machine.flops_per_s.get(model.dtype.name) or max(machine.flops_per_s.values())
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    attended = 4 * pairs * shape.num_attention_heads * shape.head_dim
    computed = batch_size * shape.num_hidden_layers * (2 * prompt_tokens * sum(held.products) + attended)
    try:
        first_s = timing(job, machine).plain_prefill_s
    except PlacementError:  # heads that so many ranks cannot share
        return
    assert first_s >= computed / (num_ranks * rate)
    read = step_bytes(held, model, device=machine.device)
    assert first_s >= 0.99 * read / (num_ranks * machine.bandwidth_bytes_per_s), "norms are no matrices"


@pytest.mark.parametrize(("target", "num_gpus", "published_ms"), [("llama2_7B", 1, 132.4), ("llama2_70B", 8, 249.2)])
def test_published_prompts_of_tensorrt_llm_on_a100_are_forecast_within_a_fifth(
    target: str, num_gpus: int, published_ms: float
) -> None:
    job = make_job(target, num_ranks=num_gpus, prompt_tokens=2048, max_new_tokens=1)
    assert 1e3 * timing(job, A100).plain_prefill_s == pytest.approx(published_ms, rel=0.2)


def test_a_short_prompt_on_a_gpu_takes_as_long_as_its_launches_and_a_long_one_as_its_products() -> None:
    """An H200 gave the first token of 30B after 26 ms."""
    machine = hardware.load("1xh200")
    short_s, long_s = (timing(make_job("30B", prompt_tokens=number), machine).prefill_s for number in (4, 512))
    launches_s = (60 * OPERATORS_PER_LAYER + ENGINE_KERNELS.frame) * machine.launch_s
    assert short_s == pytest.approx(launches_s, rel=0.01)
    assert long_s > 2 * launches_s
    launched = replace(make_job("30B", prompt_tokens=512), cuda_graphs=False)
    assert timing(launched, machine).prefill_s == long_s, "prompts are launched from Python in any case"
