"""Warnings of choices that cannot gain, and changes that fit: those that lose least come first."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from llama_ssp.catalogue import Dtype
from llama_ssp.extensions.advice import advice as changes
from llama_ssp.extensions.advice.advice import Loss, changes_that_fit, faster_on_fewer, same_kind
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig
from llama_ssp.planning.memory import fits, fullest_rank, memory
from llama_ssp.planning.plan import make_plan, shortage
from llama_ssp.planning.spec import PlanSpec, without_draft
from llama_ssp.reports.plan_tables import show
from llama_ssp.run.commands import plan
from llama_ssp.settings.schema import DraftLayout
from llama_ssp.text.messages import rounded
from tests.helpers.extensions import need
from tests.helpers.in_process import call, launch, planned
from tests.helpers.planning import make_spec, small_model, times_of

A100 = replace(hardware.load("8xa100_80gb"), sums=[])
SHARDED = DraftLayout.sharded


PAIR_70B, PAIR_65B = ("llama2_70B", "llama2_7B"), ("65B", "7B")


@pytest.mark.parametrize(
    ("spec", "machine", "said", "unsaid"),
    [
        (make_spec(*PAIR_70B, num_ranks=8), A100, ["llama2_7B alone on one GPU", "placement.draft.kind=sharded"], ""),
        (make_spec(*PAIR_70B, num_ranks=8, draft_kind=SHARDED), A100, [], "cannot gain"),
        (
            make_spec("llama3_1B", of_target={"dtype": Dtype.bf16}),
            hardware.load("t4"),
            ["a T4 does not multiply in bf16: model.dtype=fp16 does"],
            "",
        ),
        (make_spec("llama3_1B", of_target={"dtype": Dtype.bf16}), hardware.load("l4"), [], "model.dtype"),
        (
            make_spec(*PAIR_65B, num_ranks=8, of_draft={"quantization": "int8"}),
            A100,
            ["an int8 draft through bitsandbytes cannot gain"],
            "",
        ),
        (make_spec(*PAIR_65B, num_ranks=8), A100, [], "bitsandbytes"),
    ],
)
def test_a_plan_warns_of_what_cannot_gain_and_names_a_better_choice(
    spec: PlanSpec, machine: HardwareConfig, said: list[str], unsaid: str
) -> None:
    warnings = "\n".join(make_plan(spec, machine).warnings)
    assert all(words in warnings for words in said)
    assert not (unsaid and unsaid in warnings)


def test_a_draft_that_gains_with_another_k_loses_and_one_without_a_model_too() -> None:
    spec = make_spec("13B", "7B", num_ranks=4, draft_kind=SHARDED)
    (warning,) = (said for said in make_plan(spec, A100).warnings if "the draft" in said)
    assert warning.startswith("the draft loses: ")
    assert ", the best, K=" in warning
    copies = replace(make_spec("13B", batch_size=64), free_draft="ngram", num_draft_tokens=8, acceptance=0.1)
    assert times_of(copies, A100).speedup < 1
    assert any(said.startswith("draft=ngram loses: K=8 gives 0.") for said in make_plan(copies, A100).warnings)


def test_a_smaller_draft_that_gains_clearly_more_is_named() -> None:
    smaller, asked = (make_spec("13B", draft, acceptance=None) for draft in ("tinyllama_1B", "7B"))
    gains = [
        timed.plain_s / min(timed.by_num_draft_tokens) for timed in (times_of(spec, A100) for spec in (smaller, asked))
    ]
    said = f"draft=tinyllama_1B is forecast to give {gains[0]:.2f}x with its best K, 7B {gains[1]:.2f}x with its own"
    assert said in make_plan(asked, A100).notes
    for others in (smaller, replace(asked, acceptance=0.6)):  # nobody knows how often the other one is accepted
        assert not [note for note in make_plan(others, A100).notes if note.startswith("draft=")]


H100 = hardware.load("8xh100")
TWO_NODES = replace(H100, num_nodes=2)


def test_one_node_is_faster_than_two_and_the_plan_says_so() -> None:
    spec = make_spec("llama3_70B", "llama3_8B", num_ranks=16, draft_kind=SHARDED)
    alone: Any = same_kind(spec, 8)
    here, there = times_of(spec, TWO_NODES), times_of(alone, H100)
    assert there.plain_s < 0.7 * here.plain_s
    (said,) = faster_on_fewer(spec, TWO_NODES, here)
    assert said.startswith(f"one node is faster than all 2: {rounded(1e3 * there.plain_s)} ms/token plain and ")
    assert f"here {rounded(1e3 * here.plain_s)} ms/token plain" in said
    assert "placement.num_replicas=2" in said
    assert said in make_plan(spec, TWO_NODES).warnings


def test_gpus_that_help_and_those_without_which_nothing_fits_are_not_warned_of() -> None:
    small = replace(TWO_NODES, memory_bytes=16 * 10**9)
    helped = make_spec("llama2_70B", "llama2_7B", num_ranks=8, draft_kind=SHARDED)
    for spec, machine in (helped, A100), (make_spec("llama3_70B", num_ranks=16), small):
        assert list(faster_on_fewer(spec, machine, times_of(spec, machine))) == []


def test_replicas_that_would_serve_a_batch_better_are_named_with_both_rates() -> None:
    spec = make_spec("llama3_8B", num_ranks=16, batch_size=16)
    timed = times_of(spec, TWO_NODES)
    (said,) = faster_on_fewer(spec, TWO_NODES, timed)
    assert said.startswith("replicas would serve the batch better: ")
    assert f"here {rounded(16 / timed.plain_s, 4)}" in said
    settings = dict(word.split("=") for word in said.rpartition(": ")[2].split())
    num_replicas, rows = int(settings["placement.num_replicas"]), int(settings["batch_size"])
    assert num_replicas * rows >= 16
    better: Any = same_kind(replace(spec, num_replicas=num_replicas, batch_size=rows), 16 // num_replicas)
    assert num_replicas * rows / times_of(better, TWO_NODES).plain_s > 1.1 * 16 / timed.plain_s


def test_ranks_of_a_cpu_are_not_called_gpus() -> None:
    machine = replace(hardware.load("laptop_cpu"), num_gpus=2)
    spec = make_spec("tiny", num_ranks=2, device="cpu", cuda_graphs=False)
    assert all("GPU" not in said for said in faster_on_fewer(spec, machine, times_of(spec, machine)))


A10G = hardware.load("g5_12xlarge")
ONE_A10G = replace(A10G, num_gpus=1)
LAPTOP = hardware.load("laptop_cpu")


def changes_of(key: str, spec: PlanSpec, machine: HardwareConfig) -> list[dict[str, str]]:
    """The settings of the changes that have one of this name."""
    named = [dict(setting.split("=", 1) for setting in change.settings) for change in changes_that_fit(spec, machine)]
    return [settings for settings in named if key in settings]


def test_a_stage_that_does_not_fit_gets_the_numbers_of_layers_that_would() -> None:
    fitting = make_spec("65B_8bit", num_ranks=4, num_stages=2)
    found = changes_that_fit(replace(fitting, layers=(60, 20)), A10G)
    assert found[0].settings == ("placement.target.layers=[40,40]",)
    assert found[0].spec.stages == fitting.stages


@pytest.mark.parametrize("draft", ["tinyllama_1B", None])
def test_other_changes_keep_the_stages_and_layers_that_were_asked_for(draft: str | None) -> None:
    """What is advised is checked as it would run: the command still has the numbers of layers."""
    spec = make_spec("65B", draft, num_ranks=4, num_stages=2, layers=(54, 26))
    machine = replace(A10G, memory_bytes=40 << 30)
    others = [found for found in changes_that_fit(spec, machine) if found.kind != "layers"]
    assert others
    assert {(found.spec.num_stages, found.spec.layers) for found in others} == {(2, (54, 26))}
    assert same_kind(spec, 3) is None
    assert [same_kind(spec, size).target_ranks for size in (2, 8)] == [(0, 1), tuple(range(8))]  # type: ignore[union-attr]


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


def test_where_rounds_fit_without_graphs_the_change_loses_nothing_but_time() -> None:
    spec = make_spec("llama3_8B", prompt_tokens=8000, of_target={"dtype": Dtype.fp32})
    (rank,) = memory(spec, A100)
    for lacking, named in (rank.graphs_bytes // 2, [{"cuda_graphs": "false"}]), (2 * rank.graphs_bytes, []):
        small = replace(A100, num_gpus=1, memory_bytes=A100.memory_bytes - rank.free_bytes - lacking)
        assert changes_of("cuda_graphs", spec, small) == named


def test_changes_are_said_in_the_words_of_the_command() -> None:
    plan = make_plan(make_spec("65B", "7B", num_ranks=4), A10G)
    assert plan.changes
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
    machine = replace(A10G, sources={})  # whose sums take no longer over more GPUs
    first, *others = changes_that_fit(make_spec("30B_8bit", "7B", num_ranks=4, prompt_tokens=1984), machine)
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
    (settings,) = changes_of("hardware", make_spec("13B"), replace(ONE_A10G, network=None))
    assert (settings["hardware"], settings["hardware.num_gpus"]) == ("rtx5090", "1")


@pytest.mark.parametrize(("name", "num_gpus"), [("h100", 1), ("2xh100", 2), ("8xh100", 2)])
def test_more_gpus_of_a_node_are_named_whatever_number_its_name_counts(name: str, num_gpus: int) -> None:
    machine = replace(hardware.load(name), num_gpus=num_gpus)
    spec = make_spec("llama3_70B", num_ranks=num_gpus, prompt_tokens=4000 * num_gpus, batch_size=32)
    assert not fits(spec, machine)
    found = [settings["hardware.num_gpus"] for settings in changes_of("hardware.num_gpus", spec, machine)]
    assert str(2 * num_gpus if num_gpus == 2 else 4) in found


@pytest.mark.parametrize(
    ("batch_size", "prompt_tokens", "found"), [(1, 128, "h200"), (32, 8000, "mi325x"), (128, 8000, "2x")]
)
def test_other_machines_are_named_by_the_number_of_their_gpus_then_by_memory(
    batch_size: int, prompt_tokens: int, found: str
) -> None:
    spec = make_spec("llama3_70B", batch_size=batch_size, prompt_tokens=prompt_tokens)
    (settings,) = changes_of("hardware", spec, hardware.load("rtx4090"))
    assert settings["hardware"].startswith(found)


def test_another_machine_has_its_own_memory_where_some_was_typed_for_the_asked_one() -> None:
    small = replace(hardware.load("h100"), memory_bytes=17 * 10**9)
    (settings,) = changes_of("hardware", make_spec("llama3_8B"), small)
    assert int(settings["hardware.memory_bytes"]) == hardware.load(settings["hardware"]).memory_bytes


def test_another_format_of_as_many_bits_is_tried() -> None:
    """NormalFloat has a scale of 4 bytes for 64 weights, our own format of 4 bits for 128."""
    need("eight_bits")
    need("four_bits")
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


@pytest.mark.seconds
def test_a_cache_in_8_bits_is_named_where_the_cache_is_what_does_not_fit() -> None:
    one, spec = ONE_A10G, make_spec("llama3_8B", prompt_tokens=60_000)
    assert not fits(spec, one)
    found = next(change for change in changes_that_fit(spec, one) if change.settings == ("model.cache_dtype=int8",))
    narrow = make_spec("llama3_8B", prompt_tokens=60_000, of_target={"cache_dtype": "int8"})
    assert found.fullest.needed_bytes == memory(narrow, one)[0].needed_bytes
    assert "model.cache_dtype=int8" not in {way.settings[0] for way in changes._ways(narrow, one) if way.settings}


def test_the_warnings_of_a_plan_stand_in_its_table() -> None:
    console = Console(record=True, width=110, file=io.StringIO())
    show(make_plan(make_spec("30B", "7B", num_ranks=8), hardware.load("p4d_24xlarge")), console)
    assert "warning: the draft cannot gain" in console.export_text()


@pytest.mark.seconds
def test_a_run_that_does_not_fit_ends_with_the_smallest_change_that_does(tmp_path: Path) -> None:
    ended = launch("model=65B", "draft=7B", "hardware=t4", f"run_dir={tmp_path}", "dry_run=true")
    assert (ended.code, "the smallest change that fits" in ended.err) == (3, True)


@pytest.mark.seconds
def test_a_plan_that_does_not_fit_names_changes_that_do() -> None:
    asked = ["model=65B", "draft=7B", "hardware=g5_12xlarge"]
    content = json.loads(call(plan.main, [*asked, "format=json"]).out)
    assert content["changes"]
    for change in content["changes"]:
        replaced = {setting.partition("=")[0] for setting in change["settings"]}
        kept = [setting for setting in asked if setting.partition("=")[0] not in replaced]
        changed = planned(*kept, *change["settings"])
        assert changed["fits"]
        assert max(rank["needed_bytes"] for rank in changed["memory"]) == change["needed_bytes"]


def test_a_block_of_another_size_keeps_the_kind_of_the_draft() -> None:
    sharded = make_spec("13B", "7B", num_ranks=4, draft_kind=DraftLayout.sharded)
    assert same_kind(sharded, 2) == make_spec("13B", "7B", num_ranks=2, draft_kind=DraftLayout.sharded)
    assert same_kind(sharded, 1) == make_spec("13B", "7B")
