"""Layer-wise targets: which ranks and GPUs they have, what each holds, what a plan says, and what is refused."""

from dataclasses import replace

import pytest

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.accelerate.records import split_layers
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import memory
from llama_ssp.planning.plan import make_plan
from llama_ssp.planning.spec import spec_of_plan
from llama_ssp.run.commands.own_ranks import read_start
from llama_ssp.settings import checks
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DrafterConfig,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    PlanConfig,
    TargetPlacement,
)
from tests.helpers.composed import check_refused
from tests.helpers.extensions import module_of
from tests.helpers.planning import make_spec, times_of

A100 = replace(hardware.load("8xa100_80gb"), sums=[])
NODE = hardware.load("p4d_24xlarge")
KIND = "accelerate"
BAD = {
    "placement=accelerate": "rank 1 would hold nothing: the target is on rank 0, the draft on rank 0; name",
    "placement=accelerate placement.target.ranks=[0,1]": "has one rank, which spreads the layers over all GPUs that no",
    "placement=accelerate placement.target.tp_size=2": "and tp_size=2 was given: leave it out, or use kind=tensor",
    "placement=accelerate placement.num_replicas=2": "all free GPUs of a node for one replica: use placement.num_rep",
    "placement.target.kind=accelerate placement=own_gpu cuda_graphs=true": "no effect with a target that accelerate",
    "placement.target.kind=accelerates": "unknown placement.target.kind 'accelerates': there are accelerate, ",
    "device_map=auto": "unknown setting 'device_map': placement=accelerate puts the layers one after another over",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)


def check_plan(words: str) -> None:
    (composed,) = compose(words.split(), root="plan")
    config = to_run_config(composed)
    assert isinstance(config, PlanConfig)
    checks.check_plan(config)


@pytest.mark.seconds
def test_a_search_chooses_among_other_targets() -> None:
    module_of("advice")
    check_plan("placement=accelerate")
    with pytest.raises(ConfigError, match=r"search=true chooses among targets of placement\.target\.kind=tensor"):
        check_plan("placement=accelerate search=true")


@pytest.mark.parametrize("word", ["placement=accelerate", "placement.target.kind=accelerate"])
def test_a_run_starts_one_rank_which_takes_all_gpus(word: str) -> None:
    start = read_start([word], {"CUDA_VISIBLE_DEVICES": "0,1"}, default=None)
    assert (start.num_ranks, start.sentence) == (1, "starting 1 rank (ranks=N starts more)…")


@pytest.mark.parametrize("num_devices", [1, 2, 3, 9])
def test_every_layer_is_in_one_place_and_devices_hold_as_many(num_devices: int) -> None:
    split = split_layers(7, num_devices=num_devices)
    assert [layer for part in split for layer in part] == list(range(7))
    assert len(split) == num_devices
    assert max(map(len, split)) - min(len(part) for part in split if part) <= 1
    spec = make_spec("13B", num_ranks=num_devices, target_kind=KIND, cuda_graphs=False)
    assert sum(rank.target_weights_bytes for rank in memory(spec, A100)) == 26_031_728_640


@pytest.mark.parametrize(
    ("draft", "devices", "draft_ranks"),
    [
        (DraftPlacement(), range(8), [0]),
        (DraftPlacement(kind=DraftLayout.own_gpu), range(7), [7]),
        (DraftPlacement(kind=DraftLayout.own_gpu, ranks=[1, 2]), [0, 3, 4, 5, 6, 7], [1, 2]),
    ],
)
def test_a_layer_wise_target_has_one_rank_and_the_gpus_of_its_node_that_no_rank_has(
    draft: DraftPlacement, devices: range | list[int], draft_ranks: list[int]
) -> None:
    placement = PlacementConfig(target=TargetPlacement(kind=KIND), draft=draft)
    drafter = DrafterConfig(kind=MODEL_DRAFT, model=catalogue.load("7B"))
    config = PlanConfig(model=catalogue.load("13B"), draft=drafter, hardware={}, placement=placement)
    spec = spec_of_plan(config, NODE)
    assert spec.target_ranks == (0,)
    assert spec.target_devices == tuple(devices)
    assert spec.draft_ranks == tuple(draft_ranks)


def test_a_plan_says_over_which_gpus_the_target_is_placed() -> None:
    notes = make_plan(make_spec("65B", num_ranks=8, target_kind=KIND, cuda_graphs=False), A100).notes
    assert notes == ("the target is placed layer-wise over 8 GPUs of rank 0",)


def test_every_change_leaves_a_layer_wise_target_on_one_rank_and_in_the_librarys_modules() -> None:
    advice = module_of("advice.advice")
    spec = make_spec("65B", "7B", num_ranks=4, target_kind=KIND, cuda_graphs=False)
    for way in (*advice._ways(spec, NODE), *advice._smaller_targets(spec, NODE)):
        assert way.spec.target_ranks == (0,), way.settings
        assert way.spec.target.by_library, way.settings


def test_the_physical_limit_is_that_of_one_device_since_devices_take_turns() -> None:
    one, row = (times_of(make_spec("13B", num_ranks=number, target_kind=KIND), A100) for number in (1, 4))
    assert row.limit_share * row.plain_s == pytest.approx(one.limit_share * one.plain_s)
