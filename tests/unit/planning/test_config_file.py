"""Sizes of models from config.json, of families that the engine runs and of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_ssp.architectures.family import inventory
from llama_ssp.errors import CheckpointError, PlacementError
from llama_ssp.planning.spec import notes_on_families, read_config
from llama_ssp.settings.schema import Dtype, ModelConfig

SIZES = {
    "model_type": "exaone", "architectures": ["ExaoneForCausalLM"], "hidden_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def _folder(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 - JSON
    content = {key: value for key, value in (SIZES | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_a_family_that_the_engine_does_not_run_is_read_for_plans_alone(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    shape, stored = read_config(folder, any_family=True)
    assert (shape.model_type, shape.head_dim, stored) == ("exaone", 32, Dtype.bf16)
    with pytest.raises(PlacementError, match="exaone models are not supported"):
        read_config(folder)
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256
    assert sum(matrix.num_elements for matrix in inventory(shape).layer) == layer
    (note,) = notes_on_families(ModelConfig(name="acme/exaone", shape=shape), ModelConfig(name="unknown"))
    assert note.startswith("the engine does not run exaone models: acme/exaone is planned as a Llama of its sizes")


def test_a_family_that_the_engine_runs_gets_no_note(tmp_path: Path) -> None:
    folder = _folder(tmp_path, model_type="llama", max_position_embeddings=64)
    shape, _ = read_config(folder, any_family=True)
    assert (shape, Dtype.bf16) == read_config(folder)
    assert list(notes_on_families(ModelConfig(name="mine", shape=shape))) == []


def test_the_sizes_of_the_text_part_are_read(tmp_path: Path) -> None:
    text = {key: SIZES[key] for key in SIZES if key not in {"model_type", "architectures", "torch_dtype"}}
    names = ["PictureForConditionalGeneration"]
    picture = {"model_type": "picture", "architectures": names, "text_config": text, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(picture))
    shape, stored = read_config(tmp_path, any_family=True)
    assert (shape.model_type, shape.hidden_size, stored) == ("picture", 128, Dtype.bf16)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_every_size_of_such_a_family_must_be_known(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"lacks {key}: "):
        read_config(_folder(tmp_path, **{key: None}), any_family=True)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_local_experts": 8}, "exaone models have experts"),
        ({"n_routed_experts": 64}, "exaone models have experts"),
        ({"is_encoder_decoder": True}, "do not continue a text"),
        ({"architectures": ["ExaoneForMaskedLM"]}, r"exaone models \(ExaoneForMaskedLM\) do not continue a text"),
    ],
)
def test_what_no_dense_decoder_is_stays_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=complaint):
        read_config(_folder(tmp_path, **changes), any_family=True)


@pytest.mark.parametrize("value", [True, "128", 1.5, [128], -1])
def test_a_size_of_the_text_part_that_is_no_size_is_missing(value: object, tmp_path: Path) -> None:
    folder = _folder(tmp_path, hidden_size=None, text_config={"hidden_size": value})
    with pytest.raises(CheckpointError, match="lacks hidden_size"):
        read_config(folder, any_family=True)
