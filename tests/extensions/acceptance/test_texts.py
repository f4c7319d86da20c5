"""Which finished texts are read: the answers to a batch file, if they are of the law that is asked about."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.extensions.acceptance.texts import read_texts
from tests.helpers.composed import compose_run
from tests.helpers.extensions import PRESENT

BIAS = {"logit_bias": {"7": 2}}
LAWS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"top_k": 5}, "", "top_k=5"),
    ({"top_k": -1, "min_p": 0, "top_p": 1, "min_tokens": 0}, "", None),
    ({"top_k": 5}, "sampling.top_k=5", None),
    ({"frequency_penalty": 0.5}, "", "frequency_penalty=0.5"),
    (BIAS, "", "logit_bias={'7': 2}"),
    (BIAS, "sampling.logit_bias={7: 2}", None),
    ({"min_tokens": 3}, "", "min_tokens=3"),
    ({"response_format": {"type": "text"}}, "", None),
]
if "grammars" in PRESENT:
    LAWS += [({"response_format": {"type": "json_object"}}, "", "response_format"), ({"guided_regex": "a"}, "", "guid")]


@pytest.mark.parametrize(("field", "setting", "said"), LAWS)
def test_answers_of_another_law_are_refused(
    field: dict[str, Any], setting: str, said: str | None, tmp_path: Path
) -> None:
    requests, answers = tmp_path / "batch.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(json.dumps({"custom_id": "a", "body": {"prompt": [5, 6], "temperature": 0.8} | field}))
    choice = {"text": "", "token_ids": [7, 8, 9]}
    answers.write_text(json.dumps({"custom_id": "a", "response": {"body": {"choices": [choice]}}}))
    words = f"task.texts={answers}", f"prompts={requests}", "sampling.temperature=0.8", *filter(None, [setting])
    config, _ = compose_run("task=acceptance", *words)
    tokenizer: Any = SimpleNamespace(eos_token_id=1)
    how = pytest.raises(ConfigError, match="was drawn with") if said else nullcontext()
    with how as error:
        [text] = read_texts(config, str(answers), tokenizer, vocab_size=10, context=10)
        assert (text.prompt_ids, text.token_ids) == ((5, 6), (7, 8, 9))
    assert said is None or f"was drawn with {said}" in str(error and error.value)
