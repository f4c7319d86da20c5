"""What a plan's settings must satisfy: every problem at once."""

from typing import Any

import pytest
import yaml

from llama_ssp.errors import ConfigError
from llama_ssp.settings import catalogue, folders, schema
from llama_ssp.settings.checks import check_plan as check
from llama_ssp.settings.drafters import DraftTokenizer, ModelDraftConfig, problems_of_pair
from llama_ssp.settings.schema import (
    MODEL_DRAFT,
    DraftLayout,
    DraftPlacement,
    PlacementConfig,
    PlanConfig,
    TargetKind,
    TargetPlacement,
)

LAYER_WISE = PlacementConfig(target=TargetPlacement(kind=TargetKind.accelerate))


def _config(draft: str = "7B", *, own: bool = False, **fields: Any) -> PlanConfig:  # noqa: ANN401 - the fields of PlanConfig
    text = (folders.conf_dir() / "hardware" / "p4d_24xlarge.yaml").read_text()
    fields.setdefault("hardware", yaml.safe_load(text))
    tokenizer = DraftTokenizer.own if own else DraftTokenizer.same
    drafter = ModelDraftConfig(kind=MODEL_DRAFT, model=catalogue.load(draft), tokenizer=tokenizer)
    return PlanConfig(model=catalogue.load("30B"), draft=drafter, **fields)


def _complaint(config: PlanConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


def test_sound_settings_pass() -> None:
    check(_config())
    check(_config("llama3_1B", own=True))
    check(_config(placement=LAYER_WISE))


def test_problems_of_hardware_and_settings_are_one_message() -> None:
    config = _config(batch_size=0, speculation=schema.SpeculationConfig(num_draft_tokens=0, acceptance=1.5))
    config.hardware["num_gpus"] = 0
    config.model.shape.hidden_size = -1  # type: ignore[union-attr]
    said = _complaint(config)
    assert said.startswith("5 problems")
    for complaint in ("hardware.num_gpus=0", "batch_size=0", "num_draft_tokens=0", "acceptance=1.5", "hidden_size=-1"):
        assert complaint in said


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (_config(placement=PlacementConfig(target=TargetPlacement(tp_size=9))), "the number of ranks, here 8"),
        (_config(prompt_tokens=3936), "make 4000, and the context of model=30B has 2048 tokens"),
        (_config(draft="llama3_1B"), "model=30B has 32000 tokens, draft=llama3_1B 128256; drafts that fit: tiny"),
        (_config(own=True), "draft.tokenizer=own has no effect with draft=7B, which has the target's tokenizer"),
        (_config(placement=LAYER_WISE, search=True), "search=true chooses among targets of placement.target.kind=tens"),
    ],
)
def test_what_cannot_be_planned_is_refused(config: PlanConfig, complaint: str) -> None:
    assert complaint in _complaint(config)


def test_a_draft_cannot_have_a_gpu_of_its_own_where_there_is_one() -> None:
    config = _config(placement=PlacementConfig(draft=DraftPlacement(kind=DraftLayout.own_gpu)))
    config.hardware["num_gpus"] = 1
    assert "own_gpu needs a GPU in addition to the target's" in _complaint(config)


def test_a_pair_is_judged_as_a_run_judges_it() -> None:
    config = _config("qwen2.5_0.5B")
    config.model = catalogue.load("qwen2.5_7B")
    check(config)
    config.draft.model = catalogue.load("llama3_1B")
    (problem,) = problems_of_pair(config.model, config.draft)
    assert problem.endswith("drafts that fit: qwen2.5_0.5B; draft.tokenizer=own allows any")
    assert _complaint(config) == problem
