"""Times: what each piece of a round must cost, also of rounds that overlap."""

import random
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_ssp import catalogue
from llama_ssp.architectures.engine import CPU_KERNELS, ENGINE_KERNELS
from llama_ssp.architectures.family import inventory
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.acceptance import overlapped_corrections, overlapped_tokens
from llama_ssp.planning.collectives import round_messages
from llama_ssp.planning.forwards import OPERATORS_PER_LAYER
from llama_ssp.planning.memory import kv_bytes_per_token
from llama_ssp.planning.model import planned_model
from llama_ssp.planning.plan import document, make_plan
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.planning.timing import CostModel, OverlappedTime
from llama_ssp.planning.weights import model_bytes, step_bytes
from llama_ssp.settings.schema import DraftLayout
from tests.helpers.planning import make_spec, small_model, times_of

A100 = hardware.load("8xa100_80gb")


def test_a_round_is_k_draft_steps_a_verification_and_the_rest() -> None:
    spec = make_spec("13B", "7B", num_ranks=2)
    timed, clock = times_of(spec, A100), CostModel(spec, A100)
    drafting = clock.draft_step_s(2) + 3 * clock.draft_step_s(1)
    assert timed.round_s == pytest.approx(drafting + timed.verify_s)
    assert timed.verify_s == pytest.approx(timed.verify_forward.total_s + clock.verdict_s(4))
    assert timed.speculative_s == pytest.approx(timed.round_s / 3.3616)


def test_judging_a_draft_as_a_whole_takes_kernels_and_passes_of_its_own() -> None:
    machine, spec = A100, make_spec("7B", "tinyllama_1B")
    by_block = replace(spec, rule="block")
    plain_s, block_s = (CostModel(one, machine).rule_s(5) for one in (spec, by_block))
    passes_s = 8 * 4 * 5 * spec.target.shape.vocab_size / machine.read_bytes_per_s
    assert block_s - plain_s == pytest.approx(12 * machine.kernel_s + passes_s)
    assert times_of(by_block, machine).plain_s == times_of(spec, machine).plain_s


def test_a_prompt_is_read_by_the_target_and_by_the_draft() -> None:
    pair, target, draft = (times_of(spec, A100) for spec in (make_spec("13B", "7B"), make_spec("13B"), make_spec("7B")))
    assert pair.prefill_s == pytest.approx(target.prefill_s + draft.prefill_s, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "quantization", "is_packed"),
    [("cuda", "none", True), ("cuda", "int8_weight_only", True), ("cuda", "int8", False), ("cpu", "none", False)],
)
def test_packed_prompts_take_the_time_of_their_mean_length(device: str, quantization: str, is_packed: bool) -> None:
    machine = hardware.load("8xa100_80gb" if device == "cuda" else "laptop_cpu")
    spec = make_spec(small_model(quantization=quantization), device=device, prompt_tokens=512 if is_packed else 1536)
    ragged = replace(spec, prompt_tokens=1536, mean_prompt_tokens=512.0)
    assert times_of(ragged, machine).prefill_s == times_of(spec, machine).prefill_s


def test_the_length_limit_cuts_last_rounds_so_that_whole_rounds_are_paid() -> None:
    """All drafts accepted, four tokens a round: 61 to 64 tokens behind the prompt's own take 16 rounds each."""
    rounds = []
    for num_tokens in range(62, 66):
        timed = times_of(make_spec("13B", "7B", num_draft_tokens=3, acceptance=1.0, max_new_tokens=num_tokens), A100)
        rounds.append((timed.speculative_run_s * num_tokens - timed.prefill_s) / timed.round_s)
    assert sum(rounds) / 4 == pytest.approx(16)


def test_decoding_is_priced_in_the_middle_of_a_completion() -> None:
    """128 tokens of the prompt and half of 2048 new ones are within 5 steps of 256 slots."""
    spec = make_spec("7B", prompt_tokens=128, max_new_tokens=2048)
    cache_bytes = 5 * 256 * kv_bytes_per_token(spec.target)
    assert times_of(spec, A100).target_forward.attention_s == pytest.approx(
        cache_bytes / A100.read_bytes_per_s, rel=1e-3
    )


def test_a_cache_of_fewer_bits_is_read_sooner() -> None:
    """Heads of 128 dimensions have 132 bytes in int8, with their scale, of 256 in fp16."""
    target = replace(planned_model(catalogue.load("7B"), device="cpu"), dtype=Dtype.fp16)
    jobs = [make_spec(target, prompt_tokens=1024, of_target={"cache_dtype": name}) for name in ("auto", "fp16", "int8")]
    exact_s, *others_s = (times_of(spec, A100).target_forward.attention_s for spec in jobs)
    assert [seconds / exact_s for seconds in others_s] == pytest.approx([1, 132 / 256], rel=1e-3)


def test_ranks_with_a_draft_each_draft_and_judge_their_share_of_the_rows() -> None:
    shared = make_spec("13B", "7B", num_ranks=4, draft_kind=DraftLayout.replicated, batch_size=8)
    alone = make_spec("13B", "7B", batch_size=2)
    assert times_of(shared, A100).draft_forward_s == pytest.approx(times_of(alone, A100).draft_forward_s)
    joint, share = (CostModel(spec, A100) for spec in (shared, alone))
    assert joint.draft
    assert share.draft
    assert joint.prefill_s(joint.draft) == pytest.approx(share.prefill_s(share.draft))
    assert joint.rule_s(5) == pytest.approx(share.rule_s(5))


def test_a_draft_scores_its_last_token_alone() -> None:
    clock = CostModel(make_spec("13B", "7B"), replace(A100, flops_per_s={"fp16": 1e9}, flops_share=1.0))
    assert clock.draft
    one_s, two_s = (clock.forward(clock.draft, num_positions).matrices_s for num_positions in (1, 2))
    assert 2 * one_s - two_s == pytest.approx(2 * 32000 * 4096 / 1e9, rel=1e-6)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int8_weight_only", 8), ("int4_weight_only", 4.25)])
def test_a_cpu_reads_packed_weights_once(quantization: str, bits: float) -> None:
    spec, machine = make_spec("7B", of_target={"quantization": quantization}), hardware.load("laptop_cpu")
    packed_s = times_of(spec, machine).plain_s
    num_weights = 32 * sum(matrix.num_elements for matrix in inventory(spec.target.shape).layer)
    assert 1 < packed_s / (num_weights * bits / 8 / machine.read_bytes_per_s) < 1.3


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
    ranks: dict[str, Any] = {"target_ranks": tuple(target), "draft_ranks": tuple(draft)}
    spec = make_spec("13B", "7B", num_draft_tokens=K, batch_size=ROWS, draft_kind=kind, **ranks)
    found = round_messages(spec, K)
    kinds = ("ids", "probabilities", "verdict")
    assert [found[kind].received_bytes if kind in found else 0 for kind in kinds] == arriving
    assert "probabilities" not in round_messages(replace(spec, rule="greedy"), K)
    assert [*round_messages(spec, 0)] == ["verdict"] * (len(target + draft) > 2), "of a plain token"


def test_the_physical_limit_is_a_copy_of_what_a_step_reads_and_its_shares_follow() -> None:
    """13B in fp16: all weights but the embedding's rows, and keys and values of 100 tokens."""
    machine = replace(A100, copy_bytes_per_s=1e12, bandwidth_bytes_per_s=2e12)
    spec = make_spec("13B", prompt_tokens=90, max_new_tokens=20)
    shape = spec.target.shape
    embedding = 2 * shape.vocab_size * shape.hidden_size
    read = model_bytes(inventory(shape), spec.target, device="cuda").total_bytes - embedding
    read += 100 * kv_bytes_per_token(spec.target)
    timed = times_of(spec, machine)
    assert timed.limit_share * timed.plain_s == pytest.approx(read / 2e12)


MACHINES = [hardware.load(name) for name in sorted(hardware.names()) if not hardware.load(name).is_measured]
MODELS = [entry.name for entry in catalogue.entries() if entry.shape and not entry.shape.is_head]


@pytest.mark.seconds
@given(
    target=st.sampled_from(MODELS),
    machine=st.sampled_from(MACHINES),
    power=st.integers(0, 3),
    prompt_tokens=st.integers(1, 40_000),
    batch_size=st.integers(1, 64),
)
@settings(deadline=None, max_examples=100)
def test_no_first_token_comes_before_the_devices_could_compute_or_read_it(
    target: str, machine: HardwareConfig, power: int, prompt_tokens: int, batch_size: int
) -> None:
    """At the data sheet's rates, over all ranks: every matrix for each position, and each pair of positions twice."""
    num_ranks = min(2**power, machine.num_gpus)
    spec = make_spec(
        target,
        num_ranks=num_ranks,
        prompt_tokens=prompt_tokens,
        batch_size=batch_size,
        device=machine.device,
        cuda_graphs=machine.device == "cuda",
    )
    model, held = spec.target, inventory(spec.target.shape)
    shape, rate = model.shape, machine.flops_per_s.get(model.dtype.name) or max(machine.flops_per_s.values())
    pairs = prompt_tokens * (prompt_tokens + 1) / 2
    attended = 4 * pairs * shape.num_attention_heads * shape.head_dim
    computed = batch_size * shape.num_hidden_layers * (2 * prompt_tokens * sum(held.products) + attended)
    try:
        first_s = times_of(spec, machine).plain_prefill_s
    except PlacementError:  # heads that so many ranks cannot share
        return
    assert first_s >= computed / (num_ranks * rate)
    read = step_bytes(held, model, device=machine.device)
    assert first_s >= 0.99 * read / (num_ranks * machine.bandwidth_bytes_per_s), "norms are no matrices"


def test_a_short_prompt_on_a_gpu_is_a_graph_or_takes_as_long_as_its_launches_and_a_long_one_as_its_products() -> None:
    """An H200 gave the first token of 30B after 26 ms when it was launched from Python."""
    machine, spec = hardware.load("1xh200"), make_spec("30B", prompt_tokens=6)
    long, launched = replace(spec, prompt_tokens=512), replace(spec, cuda_graphs=False)
    short, long_one, from_python = (times_of(one, machine) for one in (spec, long, launched))
    assert short.prefill_s == pytest.approx(short.target_forward.total_s, rel=0.02)
    launches_s = (60 * OPERATORS_PER_LAYER + ENGINE_KERNELS.frame) * machine.launch_s
    assert from_python.prefill_s == pytest.approx(launches_s, rel=0.01)
    assert long_one.prefill_s > 2 * launches_s
    assert times_of(replace(long, cuda_graphs=False), machine).prefill_s == long_one.prefill_s
    batches = [times_of(replace(spec, batch_size=rows), machine).prefill_s for rows in (10, 22)]
    assert batches[0] < 1.2 * short.prefill_s, "60 tokens are read as 64"
    assert batches[1] == pytest.approx(launches_s, rel=0.01)


def test_a_cpu_pays_for_the_operators_and_the_host_of_each_round() -> None:
    laptop = hardware.load("laptop_cpu")
    of = partial(CostModel, hardware=laptop)
    plain, drafting, with_head = (
        of(make_spec("tiny", draft, device="cpu", num_draft_tokens=4)) for draft in (None, "tiny-draft", "tiny-eagle")
    )
    on_gpu = replace(plain.spec, other_kernels=ENGINE_KERNELS)
    more = CPU_KERNELS.draw + CPU_KERNELS.plain - ENGINE_KERNELS.draw
    assert plain.plain_s() - of(on_gpu).plain_s() == pytest.approx(more * laptop.launch_s)
    as_model = of(replace(with_head.spec, other_kernels=replace(CPU_KERNELS, head=0)))
    assert with_head.draft_step_s(1) - as_model.draft_step_s(1) == pytest.approx(CPU_KERNELS.head * laptop.launch_s)
    without = of(replace(drafting.spec, other_kernels=replace(CPU_KERNELS, head=0)))
    assert drafting.draft_step_s(1) == without.draft_step_s(1)


def simulated(acceptance: float, num_drafted: int, *, num_rounds: int = 200_000) -> tuple[float, float]:
    """Tokens and rejections per round, of rounds that are played out."""
    numbers, num_tokens, num_rejections, num_examined = random.Random(5), 0, 0, 1
    for _ in range(num_rounds):
        accepted = next((n for n in range(num_examined) if numbers.random() >= acceptance), num_examined)
        goes_on = accepted == num_examined
        num_tokens += accepted + (not goes_on)
        num_rejections += not goes_on
        num_examined = num_drafted if goes_on else 1
    return num_tokens / num_rounds, num_rejections / num_rounds


@pytest.mark.parametrize(("acceptance", "num_drafted"), [(0.5, 1), (0.9, 2), (0.5, 4), (0.9, 8)])
def test_the_renewal_model_is_what_rounds_yield_on_average(acceptance: float, num_drafted: int) -> None:
    tokens, rejections = simulated(acceptance, num_drafted)
    assert overlapped_tokens(acceptance, num_drafted) == pytest.approx(tokens, rel=0.01)
    assert overlapped_corrections(acceptance, num_drafted) == pytest.approx(rejections, rel=0.02)


def test_shares_of_a_round_add_up() -> None:
    time = OverlappedTime(draft_s=4.0, forward_s=3.0, exchange_s=0.5, verdict_s=0.5)
    assert time.round_s == pytest.approx(5.0)
    forecast = time.document(1.0, 4)
    assert forecast["target_idle_share"] == pytest.approx(1.5 / 5)
    assert forecast["draft_idle_share"] == pytest.approx(1.0 / 5)
    assert forecast["dropped_share"] == 0
    assert time.document(0.0, 4)["dropped_share"] == 1


CPUS = replace(hardware.load("laptop_cpu"), num_gpus=2)


def apart(**changes: Any) -> PlanSpec:
    """A spec on two ranks of a CPU."""
    changes |= {"draft_kind": DraftLayout.own_gpu, "draft_ranks": (1,), "device": "cpu", "cuda_graphs": False}
    return make_spec("tiny", "tiny-draft", **changes)


def test_a_plan_of_rounds_that_overlap_has_their_time_and_shares() -> None:
    one_by_one, at_once = times_of(apart(), CPUS), times_of(apart(overlap=True), CPUS)
    pieces = CostModel(apart(overlap=True), CPUS).overlapped(4)
    assert at_once.verify_s == pytest.approx(pieces.forward_s + pieces.verdict_s), "of K positions"
    assert one_by_one.overlap is None
    assert at_once.round_s < one_by_one.round_s
    assert at_once.tokens_per_round == pytest.approx(overlapped_tokens(0.8, 4))
    assert one_by_one.tokens_per_round == pytest.approx(3.3616)
    assert document(make_plan(apart(overlap=True), CPUS))["time"]["overlap"]["dropped_share"] < 1


def test_a_plan_warns_where_overlapping_makes_a_token_slower_and_nowhere_else() -> None:
    warned = set()
    for number, acceptance in product((1, 4, 8), (0.8, 0.97)):
        in_turn = apart(num_draft_tokens=number, acceptance=acceptance)
        overlapped = replace(in_turn, overlap=True)
        slow_s, fast_s = (times_of(spec, CPUS).speculative_s for spec in (overlapped, in_turn))
        sentences = [text for text in make_plan(overlapped, CPUS).warnings if text.startswith("overlapping ")]
        wanted = (
            f"overlapping drafting and verification does not gain: forecast {1e3 * slow_s:.3f} ms/token with "
            f"speculation.overlap=true, {1e3 * fast_s:.3f} with speculation.overlap=false"
        )
        assert sentences == ([wanted] if slow_s > fast_s else [])
        assert not [text for text in make_plan(in_turn, CPUS).warnings if "speculation.overlap" in text]
        warned.add(slow_s > fast_s)
    assert warned == {True, False}


def test_the_prompt_of_several_samples_is_read_once() -> None:
    one, eight, samples = (
        times_of(make_spec("7B", "tinyllama_1B", prompt_tokens=2000, batch_size=rows, num_samples=number), A100)
        for rows, number in ((1, 1), (8, 1), (8, 8))
    )
    assert samples.prefill_s == one.prefill_s < eight.prefill_s / 4
    assert samples.plain_s == eight.plain_s


@pytest.mark.parametrize("quantization", ["none", "int8_weight_only", "int4_weight_only"])
def test_prompts_cost_more_with_equal_bits_and_steps_of_a_row_as_much(quantization: str) -> None:
    made = partial(make_spec, "7B", prompt_tokens=512, of_target={"quantization": quantization})
    times = [times_of(made(equal_bits=is_equal), A100) for is_equal in (False, True)]
    assert times[1].target_forward.total_s == pytest.approx(times[0].target_forward.total_s)
    assert 1.5 < times[1].prefill_s / times[0].prefill_s < 12
