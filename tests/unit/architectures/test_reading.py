"""What config.json leaves to other files and to its kind: quantization, code, latents in the cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llama_ssp import catalogue
from llama_ssp.architectures.reading import check_readable, read_config, read_stored_format
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import CheckpointError
from llama_ssp.planning.spec import PlannedModel
from llama_ssp.run.checkpoints import read_tokenizer
from llama_ssp.weights import hub

LLAMA = {"model_type": "llama", "num_hidden_layers": 2}
CODE = {"AutoTokenizer": ["tokenization_other.OtherTokenizer", None]}


@pytest.mark.parametrize(
    ("file", "quantization", "counted"),
    [
        ("hf_quant_config.json", {"quant_algo": "FP8"}, "fp8_weight_only"),
        ("hf_quant_config.json", {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4"),
        ("config.json", {"group_size": 64, "bits": 4}, "int4_weight_only"),
    ],
    ids=["ModelOpt fp8", "ModelOpt nvfp4", "MLX"],
)
def test_a_quantization_that_another_file_or_field_names_is_planned(
    file: str, quantization: dict[str, Any], counted: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / file).write_text(json.dumps(LLAMA | {"quantization": quantization}))
    found = read_stored_format(tmp_path, read_config(tmp_path)[0])
    assert found
    assert found.planned == counted
    if "bits" in quantization:
        with pytest.raises(CheckpointError, match='quant_method "mlx"'):
            check_readable(tmp_path, "none")


def test_code_that_a_tokenizer_names_is_passed_over(tmp_path: Path) -> None:
    for file in hub.resolve(catalogue.load("tiny")).glob("*.json"):
        shutil.copy(file, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": CODE}))
    wanted = read_tokenizer(hub.resolve(catalogue.load("tiny")))
    assert read_tokenizer(tmp_path)("def f").input_ids == wanted("def f").input_ids


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe_lite"])
def test_every_rank_caches_the_latent_of_a_token(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 61}))
    shape, _ = read_config(tmp_path, describes=False)
    model = PlannedModel(name="mine", shape=shape, dtype=Dtype.bf16, quantization="none")
    assert model.slot_bytes(shape.num_key_value_heads) == model.slot_bytes(1) == 61 * (512 + 64) * 2
