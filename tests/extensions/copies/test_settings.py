"""Prompt look-up: what its settings must be, and what the library says of it."""

from dataclasses import replace

import pytest

from llama_ssp import load
from llama_ssp.errors import ConfigError
from llama_ssp.settings import checks, drafters
from tests.helpers.composed import check_refused, compose_run
from tests.helpers.extensions import need
from tests.helpers.hub import shipped

BAD = {
    "draft=ngram draft.longest=65": "draft.longest=65 must be 1 to 64 tokens",
    "draft=ngram draft.shortest=5": "draft.shortest=5 is more than draft.longest=4: give fewer",
    "draft=ngram draft.history=-1": "draft.history=-1 must be at least 0, which looks at no other text",
    "draft=ngram draft.history=3 speculation.tree=2x2": "draft.history has no effect with speculation.tree",
    "draft=ngram draft.corpus=x speculation.tree=2x2": "draft.corpus has no effect with speculation.tree",
    "draft.fallback=ngram": "draft.fallback has no effect without speculation.num_draft_tokens=auto",
    "draft.fallback=ngrams speculation.num_draft_tokens=auto": "'ngrams': there are ngram; did you mean ngram?",
    "draft.fallback=model speculation.num_draft_tokens=auto": "unknown draft.fallback 'model': there are ngram",
}


@pytest.mark.parametrize(("words", "sentence"), BAD.items())
def test_a_bad_setting_gets_its_sentence(words: str, sentence: str) -> None:
    if "=auto" in f"{words} {sentence}":
        need("adaptive")
    check_refused(words, sentence)


@pytest.mark.seconds
def test_a_pair_that_copies_has_a_name_and_no_weights_to_update() -> None:
    pair = load("tiny", "ngram")
    assert repr(pair) == "Pair(tiny, draft ngram, on cpu, context 2048)"
    with pytest.raises(ConfigError, match="draft=ngram has no weights of its own"):
        pair.update(draft=shipped("tiny-draft"))


def test_a_kind_of_draft_without_trees_is_refused_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    records = drafters.DRAFTERS.records
    monkeypatch.setitem(records, "ngram", replace(records["ngram"], has_trees=False))
    with pytest.raises(ConfigError, match="needs a draft with trees, and draft=ngram has none: give a draft model"):
        checks.check(*compose_run("speculation.tree=2x2", "draft=ngram"), world_size=1)
