"""A forward priced by hand: each part of the sum is there once, by the rows, slots and ranks that it is for."""

from dataclasses import replace
from typing import Any

import pytest

from llama_ssp.architectures.engine import ENGINE_KERNELS
from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.matrices import KeptStates
from llama_ssp.catalogue import Dtype
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig, Link, MeasuredSum, Speed
from llama_ssp.planning import forwards
from llama_ssp.planning.collectives import all_reduce_s, message_s
from llama_ssp.planning.forwards import (
    LIBRARY_SHARE,
    OPERATORS_PER_LAYER,
    ForwardTime,
    ModelPlacement,
    _layer_s,
    _roofline_s,
    forward_time,
)
from llama_ssp.planning.model import PlannedModel
from llama_ssp.storage.formats import format_of
from tests.helpers.planning import make_spec, small_model, times_of

MACHINE = replace(
    hardware.load("8xa100_80gb"),
    copy_bytes_per_s=1e6,
    flops_per_s={"fp16": 1e15},
    flops_share=1.0,
    kernel_s=1.0,
    launch_s=100.0,
    link=Link(bandwidth_bytes_per_s=1000.0, latency_s=3.0),
    network=Link(bandwidth_bytes_per_s=100.0, latency_s=70.0),
    sums=[],
)
NODES_OF_TWO = replace(MACHINE, num_gpus=2, num_nodes=4)
SLOW = replace(MACHINE, flops_per_s={"fp16": 1e3})
MODEL = small_model(intermediate_size=512, vocab_size=512)
LAYER, HEAD = 64 * (64 + 32 + 32 + 64 + 3 * 512), 64 * 512


def seat(num_ranks: int, *, model: PlannedModel = MODEL, cuda_graphs: bool = False) -> ModelPlacement:
    ranks = tuple(range(num_ranks))
    return ModelPlacement(model=model, ranks=ranks, cuda_graphs=cuda_graphs)


def forward(num_ranks: int, machine: HardwareConfig = MACHINE, *, num_slots: int = 100, **of_seat: Any) -> ForwardTime:
    """Three rows of five positions, one of which is scored."""
    placement = seat(num_ranks, **{"cuda_graphs": True} | of_seat)
    return forward_time(placement, machine, batch_size=3, num_positions=5, num_scored=1, bucket=num_slots)


def product_s(size: int, machine: HardwareConfig, *, form: str = "none", tokens: int = 1) -> float:
    """The product of one matrix with so many elements."""
    return _roofline_s({size: 1}, replace(MODEL, quantization=form), format_of(form), machine, tokens=tokens)


def test_a_kernel_takes_in_a_round_of_a_recurrent_layer_on_a_gpu_but_no_prompt() -> None:
    """Two layers of the library's modules, of which one is recurrent."""
    kept = KeptStates(num_layers=1, num_channels=8, width=4, num_values=16)
    modules = replace(inventory(MODEL.shape), num_layers=2, states=(kept,))
    model = replace(MODEL, shape=replace(MODEL.shape, num_hidden_layers=2, modules=modules), by_library=True)
    seated = seat(1, model=model, cuda_graphs=True)
    times = [
        forward_time(seated, MACHINE, batch_size=1, num_positions=number, num_scored=1, bucket=256).operators_s
        for number in (5, 100)
    ]
    layer = ENGINE_KERNELS.library_layer
    assert times == [ENGINE_KERNELS.frame + number for number in (2 * layer, layer + ENGINE_KERNELS.recurrent_layer)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_rank_reads_its_share_of_the_matrices(num_ranks: int) -> None:
    key_value_copies = 2 * 64 * 32 * max(num_ranks // 4 - 1, 0)
    elements = (2 * (LAYER + key_value_copies) + HEAD) / num_ranks
    assert forward(num_ranks).matrices_s == pytest.approx(2 * elements / 1e6)


def test_layers_multiply_all_rows_and_the_head_those_that_are_scored() -> None:
    assert forward(1, SLOW).matrices_s == pytest.approx(2 * (15 * 2 * LAYER + 3 * HEAD) / 1e3)


def test_a_format_whose_products_were_measured_has_its_own_speed() -> None:
    """A byte of int8 is read in 1/5e5 s, and an operation takes 1/1.5e6 s."""
    products = {"int8_weight_only": Speed(bytes_per_s=5e5, flops_per_s=1.5e6)}
    measured = replace(MACHINE, device="cpu", products=products)
    assert product_s(1000, measured, form="int8_weight_only") == pytest.approx(1000 / 5e5)
    assert product_s(1000, measured, form="int8_weight_only", tokens=5) == pytest.approx(1000 * 10 / 1.5e6)
    assert forward(1, replace(MACHINE, products=products)) == forward(1), "other formats are read like a copy"


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_on_a_cpu_a_format_of_bitsandbytes_unpacks_the_matrix_for_every_product(name: str) -> None:
    """A weight takes 0.8 ns, and its product as long as an unquantized one of 2 bytes."""
    slow, fast = replace(SLOW, device="cpu"), replace(MACHINE, device="cpu", copy_bytes_per_s=1e9)
    assert product_s(10**9, fast, form=name) == pytest.approx(0.8 + 2.0)
    assert product_s(10**9, slow, form=name) == pytest.approx(0.8 + 2e9 / 1e3)
    assert _layer_s(seat(1, model=replace(MODEL, dtype=Dtype.fp32, quantization=name)), slow, tokens=1) == 100 * 25


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "num_kv_heads"), [(1, 8, 4), (2, 4, 2), (3, 4, 2), (4, 2, 1), (8, 1, 1)]
)
def test_the_rank_with_the_most_heads_reads_keys_and_values_or_multiplies_a_position_with_those_before_it(
    num_ranks: int, num_heads: int, num_kv_heads: int
) -> None:
    """Of 100 slots, the last five positions attend to 96, 97, ... 100; keys and values are two products."""
    pairs = 96 + 97 + 98 + 99 + 100
    assert forward(num_ranks, SLOW).attention_s == pytest.approx(3 * pairs * 2 * 2 * num_heads * 8 * 2 / 1e3)
    assert forward(num_ranks).attention_s == pytest.approx(3 * 100 * 2 * (2 * num_kv_heads * 8 * 2) / 1e6)


def test_attention_whose_speed_was_measured_reads_slower_what_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 76,800 bytes, 60,000 are read like weights, at 1e6 bytes/s; then come the products."""
    monkeypatch.setattr(forwards, "_CACHED_BYTES", 60_000)
    products_s = 3 * (96 + 97 + 98 + 99 + 100) * 2 * 2 * 8 * 8 * 2 / 4e6
    speed = Speed(bytes_per_s=2e5, flops_per_s=4e6)
    measured = replace(MACHINE, device="cpu", products={"attention": speed})
    assert forward(1, measured).attention_s == pytest.approx(60_000 / 1e6 + 16_800 / 2e5 + products_s)
    by_library = forward(1, measured, model=replace(MODEL, by_library=True))
    assert by_library.attention_s == pytest.approx(76_800 / 1e6), "which calls torch's attention"


def test_operators_are_kernels_in_a_graph_and_launches_without_one_and_the_librarys_are_twice_as_many() -> None:
    assert forward(1).operators_s == 2 * ENGINE_KERNELS.layer + ENGINE_KERNELS.frame
    assert forward(1, cuda_graphs=False).operators_s == 100 * (2 * OPERATORS_PER_LAYER + ENGINE_KERNELS.frame)
    by_library = replace(MODEL, by_library=True)
    assert forward(1, model=by_library).operators_s == 2 * ENGINE_KERNELS.library_layer + ENGINE_KERNELS.frame
    library = forward(1, model=by_library, cuda_graphs=False)
    assert library.operators_s == 100 * (2 * LIBRARY_SHARE["cuda"] * OPERATORS_PER_LAYER + ENGINE_KERNELS.frame)


@pytest.mark.parametrize(
    ("batch_size", "num_ranks", "dtype", "operators"),
    [(28, 1, Dtype.fp32, 1), (29, 1, Dtype.fp32, 7), (3, 2, Dtype.fp32, 7), (3, 1, Dtype.bf16, 17)],
)
def test_a_layer_of_few_tokens_is_one_operator_on_one_rank_of_a_cpu(
    batch_size: int, num_ranks: int, dtype: Dtype, operators: int
) -> None:
    placement = seat(num_ranks, model=replace(MODEL, dtype=dtype))
    assert _layer_s(placement, replace(MACHINE, device="cpu"), tokens=5 * batch_size) == 100 * operators
    assert _layer_s(placement, MACHINE, tokens=5 * batch_size) == 100 * OPERATORS_PER_LAYER


def test_ranks_add_up_the_embedding_and_two_sums_a_layer_and_gather_the_logits_that_are_scored() -> None:
    residual_bytes, logits_bytes = 15 * 64 * 2, 3 * 512 * 2
    wanted = (2 * 2 + 1) * (3.0 + residual_bytes / 1000) + (3.0 + logits_bytes / 2 / 1000)
    assert forward(2).collectives_s == pytest.approx(wanted)
    assert forward(1).collectives_s == 0.0


def test_a_ring_sends_nearly_twice_its_bytes_inside_a_node_and_a_share_of_them_between_nodes() -> None:
    assert all_reduce_s(MACHINE, (0, 1, 2, 3), 8000) == pytest.approx(3.0 + 2 * 3 / 4 * 8000 / 1000)
    between_s = 70.0 + 2 * 3 / 4 * (8000 / 2) / 100
    assert all_reduce_s(NODES_OF_TWO, tuple(range(8)), 8000) == pytest.approx(3.0 + 8000 / 1000 + between_s)


def test_measured_sums_take_the_place_of_links_inside_a_node() -> None:
    sums = [
        MeasuredSum(num_ranks=number, num_bytes=size, s=number * size) for number in (2, 4) for size in (1000, 2000)
    ]
    of_four, of_two = (replace(machine, sums=sums) for machine in (MACHINE, NODES_OF_TWO))
    assert all_reduce_s(of_four, (0, 1, 2, 3), 1500) == pytest.approx(4 * 1500), "between two sizes"
    assert all_reduce_s(of_four, tuple(range(8)), 1000) == pytest.approx(4 * 1000), "the nearest number of ranks"
    assert message_s(of_four, (0, 1), 1000) == pytest.approx(2 * 1000)
    between_s = 70.0 + 2 * 3 / 4 * (2000 / 2) / 100
    assert all_reduce_s(of_two, tuple(range(8)), 2000) == pytest.approx(2 * 2000 + between_s)


def test_a_single_measured_sum_takes_further_bytes_over_the_links() -> None:
    machine = replace(MACHINE, sums=[MeasuredSum(num_ranks=number, num_bytes=1000, s=number) for number in (2, 4)])
    assert all_reduce_s(machine, (0, 1), 500) == 2, "no less than the small one"
    assert all_reduce_s(machine, (0, 1, 2, 3), 3000) == pytest.approx(4 + 2 * 3 / 4 * 2000 / 1000)
    assert all_reduce_s(machine, (0, 1, 2), 1000) == 4, "of two that are as near the one of more ranks"


def test_the_programs_kernel_reads_all_other_parts_and_leaves_large_sums_to_nccl() -> None:
    sums, own_sums = ([MeasuredSum(num_ranks=4, num_bytes=1000, s=s)] for s in (4.0, 1.0))
    machine, ranks = replace(MACHINE, sums=sums, own_sums=own_sums), (0, 1, 2, 3)
    assert all_reduce_s(machine, ranks, 3000, is_own=True) == pytest.approx(1 + 3 * 2000 / 1000)
    assert all_reduce_s(machine, ranks, 2**18, is_own=True) != all_reduce_s(machine, ranks, 2**18)
    assert all_reduce_s(machine, ranks, 2**18 + 1, is_own=True) == all_reduce_s(machine, ranks, 2**18 + 1)
    seated = replace(seat(4, cuda_graphs=True), own_sums=True)
    found = forward_time(seated, machine, batch_size=3, num_positions=5, num_scored=1, bucket=100)
    gather_s = all_reduce_s(machine, ranks, 3 * 512 * 2 / 2)
    assert found.collectives_s == pytest.approx(5 * all_reduce_s(machine, ranks, 15 * 64 * 2, is_own=True) + gather_s)
    assert found.operators_s == 2 * (ENGINE_KERNELS.layer - 2) + ENGINE_KERNELS.frame, "norms are in the sums"
    alone = make_spec("7B")
    assert times_of(replace(alone, own_sums=True), machine) == times_of(alone, machine), "one rank has no sums"


def test_a_message_takes_the_slower_way_where_its_ranks_are_on_two_nodes() -> None:
    assert message_s(NODES_OF_TWO, (0, 1), 500) == pytest.approx(3.0 + 0.5)
    assert message_s(NODES_OF_TWO, (1, 2), 500) == pytest.approx(70.0 + 5.0)
    assert message_s(NODES_OF_TWO, (1,), 500) == 0.0


def test_reading_and_computing_overlap_in_part_on_a_gpu_and_neither_is_undercut() -> None:
    """Both take as long at 64 tokens: with three quarters of computing, a quarter more than either."""
    even = replace(MACHINE, copy_bytes_per_s=1e6, flops_per_s={"fp16": 64e6})
    for tokens, factor in (1, 1.0), (64, 1.25), (6400, 100.0):
        seconds = product_s(10**6, even, tokens=tokens)
        assert seconds == pytest.approx(2 * factor, rel=1e-3)
        assert seconds >= 2 * max(1, tokens / 64)
    in_fp32, on_cpu = replace(MODEL, dtype=Dtype.fp32), replace(even, device="cpu", slowdown={})
    assert _roofline_s({10**6: 1}, in_fp32, format_of("none"), on_cpu, tokens=64) == pytest.approx(4.0)


def test_a_machine_may_read_packed_weights_as_fast_as_a_copy() -> None:
    """ExLlamaV2 with 7B in 4 bits on an RTX 4090 takes 5.05 ms a token, 1.6 times a copy would take 8.4."""
    own, usual = (
        product_s(64 * 128, replace(MACHINE, slowdown=slowdown), form="int4_weight_only")
        for slowdown in ({"int4": 1.0}, {})
    )
    assert usual / own == pytest.approx(1.6)
    timed = times_of(make_spec("7B", of_target={"quantization": "int4_weight_only"}), hardware.load("rtx4090"))
    assert 4.88e-3 <= timed.plain_s <= 1.1 * 5.05e-3


def test_formats_read_and_unpack_their_own_bytes() -> None:
    """Of a copy of a matrix in 8 bits: more by each row, until unpacking takes no longer; 4 bits with scales."""
    by_format: dict[str, dict[int, float]] = {
        "int8_weight_only": {1: 1.2, 32: 1.2 + 31 * 0.0412, 33: 1.2 + 32 * 0.0412, 128: 5, 129: 5},
        "int4_weight_only": {1: 1.6 * (0.5 + 4 / 128), 32: 1.6 * (0.5 + 4 / 128) + 31 * 0.0274},
        "nf4": {1: 2},
    }
    for form, of_tokens in by_format.items():
        for tokens, times in of_tokens.items():
            found = product_s(64 * 128, MACHINE, form=form, tokens=tokens)
            assert found == pytest.approx(64 * 128 / 1e6 * times)
    assert product_s(64 * 128, MACHINE, form="nf4", tokens=2) > 4 * 64 * 128 / 1e6, "it unpacks its matrix"
