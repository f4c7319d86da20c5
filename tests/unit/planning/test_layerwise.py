"""Layer-wise placement: every layer is somewhere once, no device holds more than it may, and what waits is priced."""

from dataclasses import replace

import pytest

from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import (
    READ_BYTES_PER_S,
    RowBytes,
    check_offload,
    layer_placement_of,
    memory,
    row_bytes,
    split_row,
    waiting_bytes,
)
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.schema import Offload, TargetKind
from tests.helpers.planning import make_job, times_of

A100 = hardware.load("p4d_24xlarge")
SIZES = RowBytes(layer=10, before=3, after=5)


def job(num_devices: int, max_gb: float | None = None, *, offload: Offload = Offload.cpu) -> PlanSpec:
    row = make_job("13B", num_ranks=num_devices, target_kind=TargetKind.accelerate, cuda_graphs=False)
    if max_gb is None:
        return row
    return replace(row, offload=offload, max_device_bytes=int(max_gb * 1e9))


@pytest.mark.parametrize("max_bytes", [None, 15, 23, 28, 33, 45, 10_000])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 9])
def test_every_layer_is_in_one_place_and_no_device_is_overfull(num_devices: int, max_bytes: int | None) -> None:
    row = split_row(7, SIZES, num_devices=num_devices, max_bytes=max_bytes)
    assert [layer for part in (*row.held, row.waiting) for layer in part] == list(range(7))
    fixed = [0] * num_devices
    fixed[0] += SIZES.before
    fixed[-1] += SIZES.after
    held = [part + SIZES.layer * len(layers) for part, layers in zip(fixed, row.held, strict=True)]
    if max_bytes is not None:
        assert max(held) <= max_bytes
        assert not row.waiting or all(max_bytes - size < SIZES.layer for size in held), "a layer waits beside room"
    assert max_bytes is not None or not row.waiting


def test_a_limit_below_what_is_never_offloaded_names_the_least_that_works() -> None:
    with pytest.raises(PlacementError, match=r"max_memory_gb=0\.1 .* give at least 0\.3277"):
        layer_placement_of(job(2, 0.1))
    assert len(layer_placement_of(job(2, 0.3278)).waiting) == 40


def test_quantized_layers_cannot_wait_and_a_cpu_is_no_place_beside_itself() -> None:
    with pytest.raises(PlacementError, match=r"use model\.quantization=none"):
        check_offload(Offload.disk, quantization="nf4", device="cuda")
    with pytest.raises(PlacementError, match="use offload=disk or none"):
        check_offload(Offload.cpu, quantization="none", device="cpu")
    check_offload(Offload.disk, quantization="none", device="cpu")


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_what_devices_hold_and_what_waits_is_the_whole_model(num_devices: int) -> None:
    limited = job(num_devices, 5)
    held = [rank.target_weights_bytes for rank in memory(limited, A100)]
    assert sum(held) + waiting_bytes(limited) == 26_031_728_640
    assert max(held) <= 5e9
    assert waiting_bytes(limited) == len(layer_placement_of(limited).waiting) * row_bytes(limited).layer > 0


def test_an_embedding_that_is_the_head_too_is_held_once_more_by_a_last_device_alone() -> None:
    whole, last = (
        row_bytes(make_job("llama3_1B", num_ranks=number, target_kind=TargetKind.accelerate)) for number in (1, 2)
    )
    assert whole.before + 16 * whole.layer + whole.after == 2 * 1_235_814_400
    assert last.after - whole.after == 2 * 128_256 * 2048


def test_the_first_device_keeps_the_cache_of_the_layers_that_wait() -> None:
    limited, whole = memory(job(2, 5), A100), memory(job(2), A100)
    assert sum(rank.target_cache_bytes for rank in limited) == sum(rank.target_cache_bytes for rank in whole)
    assert limited[0].target_cache_bytes > whole[0].target_cache_bytes
    assert limited[0].activations_bytes - limited[1].activations_bytes == 2 * 13824 * 5120, "a matrix at a time"


@pytest.mark.parametrize("offload", [Offload.cpu, Offload.disk])
def test_every_forward_takes_the_time_of_reading_what_waits(offload: Offload) -> None:
    limited = job(1, 5, offload=offload)
    slower_s = times_of(limited, A100).plain_s - times_of(job(1), A100).plain_s
    assert slower_s == pytest.approx(waiting_bytes(limited) / READ_BYTES_PER_S[offload])
