"""The smallest change that fits: it does fit, and nothing lighter does."""

from dataclasses import replace

from llama_ssp.config import hardware
from llama_ssp.config.schema import DraftLayout, WholeParts
from llama_ssp.config.target_placement import TargetKind
from llama_ssp.planning.choices import changes
from llama_ssp.planning.choices.changes import smallest_changes
from llama_ssp.planning.memory import fits, memory
from llama_ssp.planning.plan import make_plan, shortage
from tests.helpers.planning import make_job, small_model

A10G = hardware.load("g5_12xlarge")


def test_a_change_is_said_in_the_words_of_the_command() -> None:
    plan = make_plan(make_job("65B", "7B", num_ranks=4), A10G)
    (change,) = plan.changes
    name, value = change.settings[0].split("=")
    assert f"that fits: {name}={value}" in shortage(plan)
    assert f"that fits: about {value} of it" in shortage(plan, words={name: "about {} of it"})


def test_a_smaller_batch_is_tried_before_another_model() -> None:
    job = make_job("13B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded, batch_size=1000)
    (setting,) = smallest_changes(job, A10G)[0].settings
    rows = int(setting.removeprefix("batch_size="))
    assert fits(replace(job, batch_size=rows), A10G)
    assert not fits(replace(job, batch_size=rows + 1), A10G)


def test_a_draft_that_crowds_one_gpu_is_sharded() -> None:
    job = make_job("30B", "7B", num_ranks=4)
    (change,) = smallest_changes(job, A10G)
    assert change.settings == ("placement.draft.kind=sharded",)
    assert change.needed_bytes <= A10G.memory_bytes


def test_a_draft_that_keeps_parts_whole_is_cut_entirely() -> None:
    job = make_job("13B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded)
    needed = {
        whole: max(rank.needed_bytes for rank in memory(replace(job, draft_whole=whole), A10G)) for whole in WholeParts
    }
    (change,) = smallest_changes(job, replace(A10G, memory_bytes=needed[WholeParts.none]))
    assert change.settings == ("placement.draft.whole=none",)
    assert change.needed_bytes == needed[WholeParts.none] < needed[WholeParts.embedding]


def test_where_one_change_is_too_little_two_are_named_and_both_run() -> None:
    (change,) = smallest_changes(make_job("65B", "7B", num_ranks=4), A10G)
    assert change.settings == ("placement.draft.kind=sharded", "model.quantization=int8")


def test_a_job_without_any_way_out_says_so() -> None:
    tiny_gpu = replace(A10G, memory_bytes=2**28, network=None)
    plan = make_plan(make_job(small_model(), num_ranks=4), tiny_gpu)
    assert plan.changes == ()
    assert "hardware=NAME" in shortage(plan)


def test_the_sentence_names_the_rank_what_fills_it_and_the_change() -> None:
    sentence = shortage(make_plan(make_job("65B", "7B", num_ranks=4), A10G))
    assert sentence.startswith("rank 0 needs 44.")
    assert "(target 30.4, draft 12.6" in sentence
    assert "of 22.2 GiB" in sentence
    assert "placement.draft.kind=sharded model.quantization=int8" in sentence


def test_every_change_leaves_a_layer_wise_target_on_one_rank_and_in_the_librarys_modules() -> None:
    job = make_job("65B", "7B", num_ranks=4, target_kind=TargetKind.accelerate, cuda_graphs=False)
    for step in changes._steps(job, hardware.load("p4d_24xlarge")):
        changed, _ = step.apply(job, A10G)
        assert changed.target_ranks == (0,), step.setting
        assert changed.target.by_library, step.setting
