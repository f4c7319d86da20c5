"""A text ends where it ends for transformers: by the generation config alone, and without one by the model config."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from llama_ssp import load
from llama_ssp.errors import CheckpointError
from llama_ssp.run.checkpoints import read_eos_ids
from tests.helpers.models import build_checkpoint
from tests.helpers.tokenizers import save_tokenizer

pytestmark = pytest.mark.seconds


def as_tuple(given: Any) -> tuple[int, ...]:  # noqa: ANN401 - of a config
    return tuple(given) if isinstance(given, list) else () if given is None else (given,)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, whose tokenizer ends a text by token 1."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build_checkpoint(folder, "llama")
    save_tokenizer(folder, 97)
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "wanted"),
    [
        ({"eos_token_id": 7}, None, (7,)),
        ({}, None, ()),  # the default of the class in transformers, 2, is not read
        ({"eos_token_id": 7}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 7}, {"bos_token_id": 0}, ()),
    ],
)
def test_a_checkpoint_ends_texts_as_in_transformers(
    checkpoint: Path, config: dict[str, Any], generation: dict[str, Any] | None, wanted: tuple[int, ...]
) -> None:
    file, old = checkpoint / "generation_config.json", json.loads((checkpoint / "config.json").read_text())
    old.pop("eos_token_id", None)
    (checkpoint / "config.json").write_text(json.dumps(old | config))
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert as_tuple(model.generation_config.eos_token_id) == wanted
    assert load(checkpoint).models.eos_ids == wanted
    assert load(model).models.eos_ids == wanted, "also of a loaded model"


@pytest.mark.parametrize(
    "inner",
    [
        {"text_config": {"eos_token_id": 9}},
        {"decoder": {"eos_token_id": [5, 6]}, "text_config": {"eos_token_id": 9}},
        {"decoder": {}, "generator": None, "text_config": {"eos_token_id": 9}},
        {"eos_token_id": 7, "text_config": {"eos_token_id": 9}},
    ],
)
def test_the_inner_config_speaks_where_the_outer_is_silent(tmp_path: Path, inner: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(inner))
    given = GenerationConfig.from_model_config(json.loads(json.dumps(inner))).eos_token_id
    assert read_eos_ids(tmp_path) == as_tuple(given)


@pytest.mark.parametrize("inner", [{"text_config": "a"}, {"decoder": {"eos_token_id": "</s>"}}])
def test_an_inner_config_of_another_kind_is_refused(tmp_path: Path, inner: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(inner))
    with pytest.raises(CheckpointError, match="an object, with token ids as special tokens, is required"):
        read_eos_ids(tmp_path)
