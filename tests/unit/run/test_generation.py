"""What a model's generation_config.json asks for: said where a run does not follow it, and followed on request."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue, load
from llama_ssp.errors import ConfigError
from llama_ssp.weights import hub
from tests.helpers.in_process import launch

ASKED: dict[str, Any] = {
    "eos_token_id": 1, "pad_token_id": 2, "do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 9,
    "suppress_tokens": [5],
}  # fmt: skip
PROMPT = "def main():\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped draft, as a checkpoint that asks for a penalty."""
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny-draft")), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(ASKED))
    return folder


def text_of(folder: Path, *settings: str) -> tuple[str, str]:
    """The text of a run, and its standard error."""
    common = ("task=generate", "draft=none", f"prompt={PROMPT}", "max_new_tokens=24", "format=jsonl")
    ended = launch(*common, f"model={folder}", f"run_dir={folder}/run{len([*folder.glob('run*')])}", *settings)
    assert ended.code == 0, ended.err
    return json.loads(ended.out)["text"], ended.err


def test_a_run_says_what_it_does_not_follow_and_follows_it_on_request(folder: Path) -> None:
    greedy, said = text_of(folder, "sampling=greedy")
    assert "asks for sampling.repetition_penalty=1.3, which this text does not follow: sampling=model takes" in said
    assert "and for suppress_tokens, which no setting follows" in said
    assert "max_new_tokens" not in said
    by_hand, said = text_of(folder, "sampling=greedy", "sampling.repetition_penalty=1.3")
    assert "repetition_penalty" not in said
    followed, said = text_of(folder, "sampling=model")
    assert (followed, "repetition_penalty" in said) == (by_hand, False)
    assert followed != greedy
    assert text_of(folder, "sampling=model", "sampling.repetition_penalty=1.0")[0] == greedy, "what is given wins"


def test_the_library_follows_it_as_transformers_does(folder: Path) -> None:
    pair = load(folder)
    with pytest.warns(UserWarning, match=r"asks for repetition_penalty=1.3, which .*: sampling='model' takes all"):
        (greedy,) = pair.generate(PROMPT, max_new_tokens=24, temperature=0)
    with pytest.warns(UserWarning, match="suppress_tokens"):
        (found,) = pair.generate(PROMPT, max_new_tokens=24, sampling="model")
    assert (found.text, found.text == greedy.text) == (text_of(folder, "sampling=model")[0], False)
    with pytest.raises(ConfigError, match="sampling='greedy' must be 'model', which takes"):
        pair.generate(PROMPT, sampling="greedy")


def test_fields_that_are_absent_have_the_defaults_of_transformers(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "top_p": 0.9}))
    given = ("sampling.temperature=1.0", "sampling.top_k=50", "sampling.top_p=0.9")
    assert text_of(folder, "sampling=model")[0] == text_of(folder, *given)[0]
    file.unlink()
    ended = launch(
        "task=generate", "draft=none", f"model={folder}", "prompt=a", "sampling=model", f"run_dir={folder}/r"
    )
    assert (ended.code, "sampling=model needs generation_config.json, which the model lacks" in ended.err) == (2, True)
