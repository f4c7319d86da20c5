"""Changes that fit: they do fit, what loses least comes first, and no plan of one warns against it."""

from dataclasses import replace

import pytest

from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning import advice as changes
from llama_ssp.planning.advice import Change, Loss, changes_that_fit
from llama_ssp.planning.memory import fits, fullest_rank, memory
from llama_ssp.planning.plan import make_plan, shortage
from llama_ssp.planning.search import without_draft
from llama_ssp.planning.spec import PlanSpec
from llama_ssp.settings.schema import DraftLayout, TargetKind
from llama_ssp.words import rounded
from tests.helpers.planning import make_spec, small_model

A10G = hardware.load("g5_12xlarge")
ONE_A10G = replace(A10G, num_gpus=1)
LAPTOP = hardware.load("laptop_cpu")


def _settings(change: Change) -> dict[str, str]:
    return dict(setting.split("=", 1) for setting in change.settings)


def test_a_large_pair_on_four_small_gpus_is_answered_with_weight_only_8_bits() -> None:
    """`int8` of bitsandbytes needs as much memory and takes 3-5 times as long."""
    first, *others = changes_that_fit(make_spec("65B", "7B", num_ranks=4), A10G)
    assert _settings(first)["model.quantization"] == "int8_weight_only"
    assert first.document()["ms_per_token"] < 30
    assert len(others) <= 2
    assert all("int8" not in change.settings for change in others)


@pytest.mark.parametrize(
    ("spec", "machine"),
    [
        (make_spec("65B", "7B"), ONE_A10G),
        (make_spec("30B", "7B", num_ranks=4), A10G),
        (make_spec("30B", draft=None, device="cpu", cuda_graphs=False), LAPTOP),
    ],
)
def test_what_loses_less_comes_first_then_fewer_changes_then_the_fastest(
    spec: PlanSpec, machine: HardwareConfig
) -> None:
    found = changes_that_fit(spec, machine)
    assert 1 <= len(found) <= 3
    order = [change.order for change in found]
    assert [loss for loss, *_ in order] == [Loss[change.document()["loss"]] for change in found]
    assert order == sorted(order)


def test_changes_are_said_in_the_words_of_the_command() -> None:
    plan = make_plan(make_spec("65B", "7B", num_ranks=4), A10G)
    name, value = plan.changes[0].settings[0].split("=")
    assert f"that fits: {name}={value}" in shortage(plan)
    assert f"that fits: about {value} of it" in shortage(plan, words={name: "about {} of it"})
    assert f"{rounded(1e3 * plan.changes[1].timed.best_s)} ms/token" in shortage(plan)


def test_a_smaller_batch_is_tried_before_another_model() -> None:
    spec = make_spec("13B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded, batch_size=1000)
    found = next(change for change in changes_that_fit(spec, A10G) if change.settings[0].startswith("batch_size="))
    assert found.settings[1:] in {(), ("draft=none",)}
    rows = int(found.settings[0].removeprefix("batch_size="))
    without = without_draft(spec) if found.settings[1:] else spec
    assert fits(replace(without, batch_size=rows), A10G)
    assert not fits(replace(without, batch_size=rows + 1), A10G)


def test_a_change_that_needs_one_setting_comes_first_even_if_another_k_would_gain_more() -> None:
    first, *others = changes_that_fit(make_spec("30B_8bit", "7B", num_ranks=4, prompt_tokens=1984), A10G)
    assert first.settings == ("placement.draft.kind=sharded",)
    assert others[0].settings[0] == "draft=tinyllama_1B"


def test_a_smaller_or_a_quantized_draft_is_named_before_none() -> None:
    """70B leaves 8 GB of an H200: the draft of 8B has room in 4 bits, that of 1B in 16."""
    named = changes_that_fit(make_spec("llama3_70B", "llama3_8B", prompt_tokens=512), hardware.load("h200"))
    of_draft = next(change for change in named if change.settings[0].startswith("draft"))
    assert of_draft.spec.draft
    without = make_plan(without_draft(of_draft.spec), of_draft.hardware)
    assert of_draft.timed.best_s < 0.6 * without.timing.plain_s
    assert all("draft=none" not in change.settings for change in named if change.loss is Loss.nothing)


def test_a_warning_of_the_plan_that_was_asked_for_rules_out_no_change() -> None:
    """A draft of bitsandbytes is warned of on any machine: this spec needs a larger one."""
    packed = make_spec("llama2_13B", "llama2_7B", of_draft={"quantization": "int8"})
    assert ("hardware.num_gpus=2",) in [change.settings for change in changes_that_fit(packed, ONE_A10G)]


def test_machines_are_named_as_they_are_the_one_with_the_least_memory_first() -> None:
    named = [_settings(change) for change in changes_that_fit(make_spec("13B"), replace(ONE_A10G, network=None))]
    machines = [
        (settings["hardware"], settings.get("hardware.num_gpus")) for settings in named if "hardware" in settings
    ]
    assert machines == [("rtx5090", "1")]


@pytest.mark.parametrize(("name", "num_gpus"), [("h100", 1), ("2xh100", 2), ("8xh100", 2)])
def test_more_gpus_of_a_node_are_named_whatever_number_its_name_counts(name: str, num_gpus: int) -> None:
    machine = replace(hardware.load(name), num_gpus=num_gpus)
    spec = make_spec("llama3_70B", num_ranks=num_gpus, prompt_tokens=4000 * num_gpus, batch_size=32)
    assert not fits(spec, machine)
    named = [_settings(change) for change in changes_that_fit(spec, machine)]
    assert str(2 * num_gpus if num_gpus == 2 else 4) in [settings.get("hardware.num_gpus") for settings in named]


def test_other_machines_are_named_by_the_number_of_their_gpus() -> None:
    named = [_settings(change) for change in changes_that_fit(make_spec("llama3_70B"), hardware.load("rtx4090"))]
    found = [settings["hardware"] for settings in named if "hardware" in settings]
    assert found == ["h200"], "one GPU before several, and the least memory of those with room"
    named = [_settings(change) for change in changes_that_fit(
        make_spec("llama3_70B", prompt_tokens=8000, batch_size=32), hardware.load("rtx4090")
    )]  # fmt: skip
    assert [settings["hardware"] for settings in named if "hardware" in settings] == ["mi325x"]
    named = [_settings(change) for change in changes_that_fit(
        make_spec("llama3_70B", prompt_tokens=8000, batch_size=128), hardware.load("rtx4090")
    )]  # fmt: skip
    assert next(settings["hardware"] for settings in named if "hardware" in settings).startswith("2x")


def test_another_format_of_as_many_bits_is_tried() -> None:
    """NormalFloat has a scale of 4 bytes for 64 weights, our own format of 4 bits for 128."""
    four = make_spec("13B", of_target={"quantization": "nf4"})
    machine = replace(ONE_A10G, memory_bytes=fullest_rank(four, ONE_A10G).needed_bytes - 1)
    found = changes_that_fit(four, machine)
    assert ("model.quantization=int4_weight_only",) in [change.settings for change in found]


@pytest.mark.parametrize(("target", "num_ranks"), [("30B", 4), ("65B", 1)])
def test_no_change_is_named_that_its_own_plan_warns_against(target: str, num_ranks: int) -> None:
    spec, machine = make_spec(target, "7B", num_ranks=num_ranks), replace(A10G, num_gpus=num_ranks)
    kept = changes._chosen(changes._fitting(changes._ways(spec, machine)), set())
    assert kept
    for one in kept:
        said = make_plan(one.spec, one.hardware).warnings
        assert all(warning.startswith("K=") for warning in said), one.settings


def test_a_job_without_any_way_out_says_so() -> None:
    tiny = replace(LAPTOP, memory_bytes=2**28)
    plan = make_plan(make_spec(small_model(), device="cpu", cuda_graphs=False), tiny)
    assert plan.changes == ()
    assert "hardware=NAME" in shortage(plan)


def test_every_change_leaves_a_layer_wise_target_on_one_rank_and_in_the_librarys_modules() -> None:
    spec = make_spec("65B", "7B", num_ranks=4, target_kind=TargetKind.accelerate, cuda_graphs=False)
    machine = hardware.load("p4d_24xlarge")
    for way in (*changes._ways(spec, machine), *changes._smaller_targets(spec, machine)):
        assert way.spec.target_ranks == (0,), way.settings
        assert way.spec.target.by_library, way.settings


def test_a_cache_in_8_bits_is_named_where_the_cache_is_what_does_not_fit() -> None:
    one, spec = ONE_A10G, make_spec("llama3_8B", prompt_tokens=60_000)
    assert not fits(spec, one)
    found = next(change for change in changes_that_fit(spec, one) if change.settings == ("model.cache_dtype=int8",))
    narrow = make_spec("llama3_8B", prompt_tokens=60_000, of_target={"cache_dtype": "int8"})
    assert found.fullest.needed_bytes == memory(narrow, one)[0].needed_bytes
    assert "model.cache_dtype=int8" not in {way.settings[0] for way in changes._ways(narrow, one) if way.settings}
