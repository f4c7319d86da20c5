"""The arguments of lm-evaluation-harness are read as its other models read them, and mistakes are sentences."""

from importlib.util import find_spec
from typing import Any

import pytest

from llama_ssp.errors import ConfigError
from llama_ssp.harness import __main__ as harness
from llama_ssp.harness.arguments import ModelArguments, generation_settings
from llama_ssp.settings.schema import SamplingConfig

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval: pip install -e '.[lm-eval]'")


def test_numbers_may_be_texts_and_what_is_none_keeps_its_default() -> None:
    given = {"model": "tiny", "draft": None, "dtype": None, "batch_size": "8", "seed": 3, "max_length": None}
    assert ModelArguments.read(given) == ModelArguments(model="tiny", batch_size=8, seed=3)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "a model is required"),
        ({"model": "tiny", "batch_size": "auto"}, "batch_size='auto' must be a whole number: at least 1 sequence"),
        ({"model": "tiny", "max_length": 0.5}, "max_length=0.5 must be a whole number or None"),
        ({"model": "tiny", "seed": True}, "seed=True must be a whole number"),
        ({"pretrained": "tiny", "model": "x"}, "unknown model argument 'pretrained': there are batch_size, device"),
        ({"model": "tiny", "drafts": "x"}, "did you mean draft?"),
        ({"model": "tiny", "trust_remote_code": True}, "unknown model argument 'trust_remote_code'"),
        ({"drafts": "x"}, "2 problems"),
    ],
)
def test_a_wrong_argument_is_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelArguments.read(given)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_draft_tokens": 0}, "speculation.num_draft_tokens=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"verification": "blocks"}, "unknown verification.rule 'blocks'"),
    ],
)
def test_a_value_out_of_range_is_a_sentence_before_anything_is_loaded(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelArguments(model="no such model", **given).settings()
    assert sentence in str(caught.value)


def read(**given: object) -> dict[str, Any]:
    return generation_settings(given, max_gen_toks=256)


@needs_harness
@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({}, SamplingConfig(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.7}, SamplingConfig(temperature=0.0)),
        ({"do_sample": True}, SamplingConfig(temperature=1.0)),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 0}, SamplingConfig(temperature=0.7, top_p=0.9)),
        ({"do_sample": True, "temperature": 0.5, "top_k": 5}, SamplingConfig(temperature=0.5, top_k=5)),
        ({"repetition_penalty": 1.2, "num_beams": 1}, SamplingConfig(temperature=0.0, repetition_penalty=1.2)),
    ],
)
def test_sampling_is_what_the_task_says(given: dict[str, Any], sampling: SamplingConfig) -> None:
    assert read(**given)["sampling"] == sampling


@needs_harness
def test_stops_and_length_come_from_the_task_or_from_the_model() -> None:
    assert [read(**{"until": until})["stop_strings"] for until in ("\n", ["a", "", "b"], None)] == [
        ["\n"],
        ["a", "b"],
        [],
    ]
    assert read()["max_new_tokens"] == 256
    assert all(read(**{name: 9})["max_new_tokens"] == 9 for name in ("max_gen_toks", "max_new_tokens", "max_tokens"))


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("beams", 1), ("logit_bias", {})])
def test_an_argument_without_a_meaning_here_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"unknown generation argument '{name}': there are do_sample, freq"):
        read(**{name: value})


def test_without_the_harness_a_sentence_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda _name: None)
    assert harness.main() == 2
    assert capsys.readouterr().err == f"lm-evaluation-harness is not installed: {harness.INSTALL}\n"
