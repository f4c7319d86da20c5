"""Plan settings that cannot hold: every problem at once, and a pair is judged as a run judges it."""

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.settings.checks import check_plan
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.schema import PlanConfig
from tests.helpers.own_conf import OwnConf

REFUSED = {
    "placement.target.tp_size=9": "tp_size=9 must be between 1 and the number of ranks, here 8",
    "placement=own_gpu hardware.num_gpus=1": "own_gpu needs a GPU in addition to the target's",
    "prompt_tokens=3936": "make 4000, and the context of model=30B has 2048 tokens",
    "draft=llama3_1B": "model=30B has 32000 tokens, draft=llama3_1B 128256; drafts that fit: tiny",
    "model=qwen2.5_7B draft=llama3_1B": "drafts that fit: qwen2.5_0.5B; draft.tokenizer=own allows any",
    "draft=7B draft.tokenizer=own": "draft.tokenizer=own has no effect with draft=7B, which has the target's tokenizer",
    "placement=accelerate search=true": "search=true chooses among targets of placement.target.kind=tensor",
}


def check(words: str) -> None:
    (composed,) = compose(words.split(), root="plan")
    config = to_run_config(composed)
    assert isinstance(config, PlanConfig)
    check_plan(config)


@pytest.mark.parametrize(("words", "sentence"), REFUSED.items())
def test_what_cannot_be_planned_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(words)


@pytest.mark.parametrize(
    "words", ["", "draft=llama3_1B draft.tokenizer=own", "placement=accelerate", "model=qwen2.5_7B draft=qwen2.5_0.5B"]
)
def test_sound_settings_pass(words: str) -> None:
    check(words)


def test_problems_of_hardware_and_settings_are_one_message(own_conf: OwnConf) -> None:
    own_conf("model/mine.yaml", "defaults: [30B, _self_]\nname: mine\nshape: {hidden_size: -1}\n")
    words = ["hardware.num_gpus=0", "batch_size=0", "speculation.num_draft_tokens=0", "speculation.acceptance=1.5"]
    with pytest.raises(ConfigError, match=r"^5 problems") as caught:
        check(" ".join(["model=mine", *words]))
    assert all(word in str(caught.value) for word in [*words, "hidden_size=-1"])
