"""Log-probabilities are those of transformers' forward of the text, whatever drafted it and how it was verified."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llama_ssp import Pair, load
from llama_ssp.errors import ConfigError
from llama_ssp.settings.schema import SamplingConfig
from tests.helpers.hub import shipped
from tests.helpers.lanes import heavy
from tests.helpers.log_probs import EXACT, check_completion

PROMPTS = ["import os\n", "def main(argument):\n    ", "class"]
SAMPLING = ("temperature", "top_k", "repetition_penalty", "frequency_penalty")
PENALIZED = SamplingConfig(temperature=0.7, top_k=9, repetition_penalty=1.2, frequency_penalty=0.3)


def library() -> PreTrainedModel:
    folder = shipped("tiny")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return library()


def scored(pair: Pair, model: PreTrainedModel, sampling: SamplingConfig, **settings: Any) -> list[list[int]]:
    """Complete the prompts, and compare their figures; returns the texts."""
    drawn = {name: getattr(sampling, name) for name in SAMPLING}
    completions = pair.generate(
        PROMPTS, max_new_tokens=10, batch_size=2, logprobs=4, prompt_logprobs=2, **drawn, **settings
    )
    for done in completions:
        check_completion(done, model, done.prompt_ids, done.token_ids, sampling, num_top=4, num_of_prompt=2)
    return [done.token_ids for done in completions]


@pytest.mark.seconds
@pytest.mark.parametrize("sampling", [EXACT, PENALIZED], ids=["model's law", "another law"])
@pytest.mark.parametrize(
    "settings",
    [{}, heavy({"plain": True}), heavy({"verification": "block"}), heavy({"verification": "coupled"})],
    ids=str,
)
def test_a_chain_changes_no_figure(
    pair: Pair, model: PreTrainedModel, sampling: SamplingConfig, settings: dict[str, Any]
) -> None:
    texts = scored(pair, model, sampling, **settings)
    assert scored(pair, model, sampling, **settings) == texts, "the cache that scoring overwrites is read anew"


@pytest.mark.seconds
@pytest.mark.parametrize("draft", ["tiny-eagle", heavy("ngram")])
def test_heads_trees_and_copies_change_no_figure(model: PreTrainedModel, draft: str) -> None:
    pair = load("tiny", draft)
    for settings in ({}, {"tree": "3x2x1"}):
        scored(pair, model, EXACT, **settings)


def test_greedy_text_has_no_law_of_draws_and_what_is_not_asked_for_is_none(pair: Pair) -> None:
    (done,) = pair.generate("import", temperature=0, max_new_tokens=3, logprobs=0)
    assert (done.drawn_logprobs, done.prompt_logprobs) == (None, None)
    assert done.logprobs is not None
    assert [one.top for one in done.logprobs] == [[], [], []]
    assert [one.token for one in done.logprobs] == done.token_ids
    (alone,) = pair.generate("import", max_new_tokens=3, prompt_logprobs=1)
    assert (alone.logprobs is None, alone.prompt_logprobs is None) == (True, False)
    assert pair.generate("import", max_new_tokens=3)[0].logprobs is None
    with pytest.raises(ConfigError, match=r"logprobs=101 must be 0 to 100 of the most probable tokens"):
        pair.generate("import", logprobs=101)
