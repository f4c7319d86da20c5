"""Warnings of choices that cannot gain, and notes of what cannot run yet."""

from dataclasses import replace

from llama_ssp.machines import hardware
from llama_ssp.machines.profile import Profile
from llama_ssp.planning import advice
from llama_ssp.planning.memory import memory
from llama_ssp.planning.plan import make_plan
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.schema import DraftLayout, Offload, TargetKind
from tests.helpers.planning import make_job

A100 = hardware.load("8xa100_80gb")


def _warnings(job: PlanSpec) -> str:
    return "\n".join(make_plan(job, A100).warnings)


def test_a_7b_draft_alone_on_one_gpu_beside_a_target_on_eight_cannot_gain() -> None:
    said = _warnings(make_job("llama2_70B", "llama2_7B", num_ranks=8))
    assert "llama2_7B alone on one GPU" in said
    assert "placement.draft.kind=sharded" in said


def test_the_same_draft_sharded_is_not_warned_of() -> None:
    assert "cannot gain" not in _warnings(
        make_job("llama2_70B", "llama2_7B", num_ranks=8, draft_kind=DraftLayout.sharded)
    )


def test_an_int8_draft_through_bitsandbytes_cannot_gain() -> None:
    job = make_job("65B", "7B", num_ranks=8)
    assert job.draft
    eight_bit = replace(job, draft=replace(job.draft, quantization="int8"))
    assert "an int8 draft through bitsandbytes cannot gain" in _warnings(eight_bit)
    assert "bitsandbytes" not in _warnings(job)


def test_a_cpu_that_was_measured_unquantized_says_so() -> None:
    profile = Profile(
        num_ranks=1, linear=[], tied_head=[], layer=[], frame=[], attention=[], draw=[], verify=[], round_s=0.0
    )
    machine = replace(hardware.load("laptop_cpu"), profiles=[profile])
    job = make_job("tiny")
    quantized = replace(job, target=replace(job.target, quantization="int8_weight_only"))
    fullest = memory(job, machine)[0]
    assert not any("unquantized" in note for note in advice.notes(job, machine, (6,), fullest))
    assert any(
        "times are those of unquantized layers" in note for note in advice.notes(quantized, machine, (6,), fullest)
    )


def test_a_k_far_from_the_best_is_told_with_the_best() -> None:
    job = make_job("65B", "7B", num_ranks=8, draft_kind=DraftLayout.sharded, num_draft_tokens=16)
    assert "speculation.num_draft_tokens=" in _warnings(job)


def test_a_target_that_a_library_places_says_what_its_forecast_leaves_out() -> None:
    layer_wise = make_job("65B", num_ranks=8, target_kind=TargetKind.accelerate, cuda_graphs=False)
    (note,) = make_plan(layer_wise, A100).notes
    assert note.startswith("the target is placed layer-wise over 8 GPUs of rank 0; host time in accelerate's hooks")
    (note,) = make_plan(make_job("65B", num_ranks=8, target_kind=TargetKind.deepspeed), A100).notes
    assert "keeps the whole target in host memory on every rank, 130.6 GB each" in note


def test_layers_that_wait_elsewhere_are_told_with_their_bytes_and_the_rate_that_is_assumed() -> None:
    job = make_job("65B", num_ranks=2, target_kind=TargetKind.accelerate, cuda_graphs=False)
    _, note = make_plan(replace(job, offload=Offload.cpu, max_device_bytes=50 * 10**9), A100).notes
    assert note.startswith("32.38 GB of the target are offloaded to host memory")
    assert "at an estimated 12 GB/s" in note


def test_uneven_heads_are_shown_with_the_rank_that_needs_most() -> None:
    notes = make_plan(make_job("30B", num_ranks=8, cuda_graphs=False), A100).notes
    assert notes == ("52 heads over 8 ranks: 7 7 7 7 6 6 6 6; rank 0 needs most",)
