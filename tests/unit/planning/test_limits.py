"""How near decoding comes to its physical limit: reading the weights, keys and values once, at the speed of a copy."""

from dataclasses import replace

import pytest

from llama_ssp.architectures.family import inventory
from llama_ssp.architectures.sizes import ENGINE_KERNELS
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import kv_bytes_per_token, model_bytes
from llama_ssp.planning.timing import timing
from llama_ssp.settings.schema import TargetKind
from tests.helpers.planning import make_job

A100 = hardware.load("8xa100_80gb")


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
