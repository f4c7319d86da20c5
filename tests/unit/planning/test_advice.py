"""Warnings of choices that cannot gain, and notes of what cannot run yet."""

from dataclasses import replace

import pytest

from llama_ssp.config import hardware
from llama_ssp.config.hardware import Profile
from llama_ssp.config.plan import TargetLayout
from llama_ssp.config.schema import DraftLayout, Quantization
from llama_ssp.planning import advice
from llama_ssp.planning.advice import not_run_yet
from llama_ssp.planning.job import Job
from llama_ssp.planning.plan import make_plan
from tests.helpers.planning import make_job

A100 = hardware.load("8xa100_80gb")


def _warnings(job: Job) -> str:
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
    eight_bit = replace(job, draft=replace(job.draft, quantization=Quantization.int8))
    assert "an int8 draft through bitsandbytes cannot gain" in _warnings(eight_bit)
    assert "bitsandbytes" not in _warnings(job)


def test_a_cpu_that_was_measured_unquantized_says_so() -> None:
    profile = Profile(
        num_ranks=1, linear=[], tied_head=[], layer=[], frame=[], attention=[], draw=[], verify=[], round_s=0.0
    )
    machine = replace(hardware.load("laptop_cpu"), profiles=[profile])
    job = make_job("tiny")
    quantized = replace(job, target=replace(job.target, quantization=Quantization.int8_weight_only))
    assert list(advice._quantization(job, machine)) == []
    assert "times are those of unquantized layers" in next(advice._quantization(quantized, machine))


@pytest.mark.parametrize("form", Quantization, ids=lambda form: form.name)
def test_every_precision_can_run(form: Quantization) -> None:
    job = make_job("7B", "7B")
    assert job.draft
    quantized = replace(job, target=replace(job.target, quantization=form), draft=replace(job.draft, quantization=form))
    assert not_run_yet(quantized) == not_run_yet(job)


def test_a_k_far_from_the_best_is_told_with_the_best() -> None:
    job = make_job("65B", "7B", num_ranks=8, draft_kind=DraftLayout.sharded, num_draft_tokens=16)
    assert "speculation.num_draft_tokens=" in _warnings(job)


def test_what_this_version_cannot_run_is_said_in_one_line() -> None:
    job = make_job("65B", "7B", num_ranks=8, target_kind=TargetLayout.accelerate)
    missing = [note for note in make_plan(job, A100).notes if "cannot run it yet" in note]
    assert missing == [
        "planned, but this version cannot run it yet: placement.target.kind=accelerate",
    ]


@pytest.mark.parametrize("kind", DraftLayout)
def test_what_this_version_runs_has_no_such_line(kind: DraftLayout) -> None:
    job = make_job("65B", "7B", num_ranks=8, draft_kind=kind)
    assert not [note for note in make_plan(job, A100).notes if "cannot run" in note]


def test_uneven_heads_are_shown_with_the_rank_that_needs_most() -> None:
    notes = make_plan(make_job("30B", num_ranks=8, cuda_graphs=False), A100).notes
    assert notes == ("52 heads over 8 ranks: 7 7 7 7 6 6 6 6; rank 0 needs most",)
