"""Drafts with another tokenizer: whom the settings allow, and the sentences for whom they do not."""

import re

import pytest

from llama_ssp import load, manifest, plan
from llama_ssp.errors import ConfigError
from llama_ssp.extensions.tokenizers.records import OWN, DraftTokenizer
from llama_ssp.settings import checks
from llama_ssp.settings.checks import check_plan
from llama_ssp.settings.compose import compose, to_run_config
from llama_ssp.settings.drafters import SAME, VOCABULARIES, vocabulary_of
from llama_ssp.settings.schema import PlanConfig
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.hub import shipped

BAD = {
    "model=gpt_neox_20B draft=gpt_neo_1.3B": "that fit: none in the catalogue; draft.tokenizer=own allows any",
    "draft=tiny-eagle draft.tokenizer=own": "draft=tiny-eagle is a draft head, which reads the target's tokens: leave",
    "draft.tokenizer=own": "draft.tokenizer=own has no effect with draft=tiny-draft, which has the target's tokeni",
    "model=30B draft=7B draft.tokenizer=own": "has no effect with draft=7B, which has the target's tokenizer",
    "task=generate model=llama3_1B draft.tokenizer=own": "draft.tokenizer has no effect without a draft model",
    "weights=synthetic draft=7B draft.tokenizer=own": "draft.tokenizer has no effect with weights=synthetic, which giv",
    "speculation.overlap=true placement=own_gpu draft=llama3_1B draft.tokenizer=own": "with the target's tokenizer",
    "draft.tokenizer=mine": "draft.tokenizer=mine: Invalid value 'mine', expected one of [same, own]",
}
GOOD = [
    "model=gpt_neox_20B draft=gpt_neo_1.3B draft.tokenizer=own",
    "model=llama3_8B draft=smollm2_135M draft.tokenizer=own placement=replicated",
    "model=7B draft=qwen2.5_0.5B draft.tokenizer=own verification=coupled",
    "model=qwen2.5_7B draft=llama3_1B draft.tokenizer=own placement=own_gpu",
    "draft.model.path=DIR draft.tokenizer=own",
]
OF_PLANS = {
    "model=qwen2.5_7B draft=llama3_1B": "drafts that fit: qwen2.5_0.5B; draft.tokenizer=own allows any",
    "draft=7B draft.tokenizer=own": "draft.tokenizer=own has no effect with draft=7B, which has the target's tokenizer",
    "draft=llama3_1B draft.tokenizer=own": None,
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    check_refused(words, sentence)


@pytest.mark.parametrize("words", GOOD)
def test_a_draft_with_another_tokenizer_is_taken(words: str) -> None:
    config, explicit = compose_run(*words.split())
    checks.check(config, explicit, world_size=2)
    assert vocabulary_of(config.draft) is OWN


@pytest.mark.parametrize(("words", "sentence"), OF_PLANS.items())
def test_plans_refuse_what_runs_refuse(words: str, sentence: str | None) -> None:
    (composed,) = compose(words.split(), root="plan")
    config = to_run_config(composed)
    assert isinstance(config, PlanConfig)
    if sentence is None:
        check_plan(config)
        return
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        check_plan(config)


@pytest.mark.parametrize("given", ["own", DraftTokenizer.own])
def test_the_library_plans_a_pair_with_two_tokenizers(given: str | DraftTokenizer) -> None:
    pair = {"model": "gpt_neox_20B", "draft": "gpt_neo_1.3B", "hardware": "8xa100_80gb"}
    with pytest.raises(ConfigError, match="drafts that fit: none in the catalogue; tokenizer=own allows any"):
        plan(**pair)  # type: ignore[arg-type]
    assert plan(**pair, tokenizer=given).spec.vocabulary is OWN  # type: ignore[arg-type]


def test_without_the_extension_who_asks_reads_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program and the library; the draft that shares the target's tokens stays."""
    VOCABULARIES.all()
    monkeypatch.setattr(manifest, "present", lambda: ())
    monkeypatch.setattr(VOCABULARIES, "records", {"same": SAME})
    with pytest.raises(ConfigError, match=r"^tokenizer=own needs the tokenizers extension, which was removed"):
        load(shipped("tiny"), shipped("tiny-draft"), tokenizer="own")
