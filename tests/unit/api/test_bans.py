"""Biases, bad words and a least length act as in transformers, on whole completions, whatever drafts."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from llama_ssp import load
from llama_ssp.errors import ConfigError
from tests.helpers.hub import shipped
from tests.helpers.in_process import launch
from tests.helpers.lanes import heavy

PROMPT = "def factorial(n):\n"


def library_text(prompt_ids: list[int], **settings: Any) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(shipped("tiny"), dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    return [int(token) for token in found[0, len(prompt_ids) :]]


@pytest.mark.seconds
@pytest.mark.parametrize("draft", [heavy("tiny-draft"), heavy("tiny-eagle"), heavy("ngram"), None])
def test_greedy_text_is_that_of_transformers(draft: str | None) -> None:
    pair = load("tiny", draft)
    (free,) = pair.generate(PROMPT, temperature=0, max_new_tokens=12)
    words = [str(pair.tokenizer.decode(ids)) for ids in (free.token_ids[:2], free.token_ids[2:3])]
    (eos,) = pair.models.eos_ids
    (found,) = pair.generate(
        PROMPT, temperature=0, max_new_tokens=12, bad_words=words, logit_bias={eos: 40, 223: -3}, min_new_tokens=7
    )
    spelled = [text for word in words for text in (word, f" {word.lstrip()}")]
    wanted = library_text(
        found.prompt_ids,
        max_new_tokens=12,
        min_new_tokens=7,
        sequence_bias=[[[eos], 40.0], [[223], -3.0]],
        bad_words_ids=[pair.tokenizer(text, add_special_tokens=False).input_ids for text in spelled],
    )
    assert found.token_ids == wanted
    assert (len(found.token_ids), found.finish_reason) == (8, "eos")
    assert free.text.startswith(words[0])
    assert not any(word in found.text for word in words)


@pytest.mark.seconds
def test_what_a_run_cannot_do_is_said(tmp_path: Any) -> None:
    words = ["task=generate", "prompt=x", "sampling.logit_bias={99999: 1}", f"run_dir={tmp_path}/run"]
    ended = launch(*words)
    assert (ended.code, "sampling.logit_bias names token 99999, and the model knows" in ended.err) == (2, True)
    pair = load("tiny")
    for wrong in ({"a": 1}, {5: "x"}, {True: 1}, [5, 1], None):
        with pytest.raises(ConfigError, match=r"logit_bias=.* must be numbers by the ids of tokens"):
            pair.generate("x", logit_bias=wrong)  # type: ignore[arg-type]
    for beyond in (float("nan"), -1e40):
        with pytest.raises(ConfigError, match=r"logit_bias=\{5: .*\} must be numbers from -10000 to 10000"):
            pair.generate("x", logit_bias={5: beyond})
