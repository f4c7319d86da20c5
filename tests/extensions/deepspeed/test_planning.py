"""Targets that DeepSpeed splits: what a plan says of them, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from llama_ssp.architectures.reading import read_config
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import PlacementError
from llama_ssp.machines import hardware
from llama_ssp.planning.memory import memory
from llama_ssp.planning.model import PlannedModel
from llama_ssp.planning.plan import make_plan
from llama_ssp.planning.weights import rank_shares
from llama_ssp.settings import checks
from llama_ssp.settings.backends import backend_of
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.models import build_checkpoint
from tests.helpers.planning import make_spec

A100 = replace(hardware.load("8xa100_80gb"), sums=[])
KIND = "deepspeed"
BAD = {
    "placement=deepspeed own_sums=true": "own_sums has no effect without placement.target.kind=tensor",
    "placement=deepspeed placement.target.experts=spread": "has no effect without placement.target.kind=tensor",
    "placement=deepspeed placement.num_replicas=2": "takes all ranks for one replica: use placement.num_repl",
    "placement=deepspeed placement.draft.kind=own_gpu": "the draft is on rank 1, the target on rank 0: use a",
    "placement=deepspeed placement.auto=true": "placement.auto=true chooses among targets of placement.target.k",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)


def test_a_sound_config_passes() -> None:
    checks.check(*compose_run("placement=deepspeed"), world_size=2)


def test_heads_that_do_not_divide_are_refused_and_what_does_not_is_said() -> None:
    with pytest.raises(PlacementError, match=r"placement\.target\.kind=tensor"):
        memory(make_spec("30B", num_ranks=8, target_kind=KIND), A100)


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    """It would cut their matrices alone."""
    build_checkpoint(tmp_path, "qwen3_next")
    model = PlannedModel(name="mine", shape=read_config(tmp_path)[0], dtype=Dtype.fp32, quantization="none")
    with pytest.raises(
        PlacementError, match="deepspeed cannot split the recurrent layers of qwen3_next models: use pl"
    ):
        rank_shares(model, num_ranks=2, backend=backend_of(KIND))


def test_a_plan_says_what_loading_needs() -> None:
    notes = make_plan(make_spec("65B", num_ranks=8, target_kind=KIND), A100).notes
    wanted = "while loading, DeepSpeed keeps the whole target in host memory on every rank, 130.6 GB each, whose capaci"
    assert (len(notes), notes[0][: len(wanted)]) == (2, wanted)
