"""A checkpoint with layers that predict further tokens (MTP) runs without them, and says so; they are no draft."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from llama_ssp.settings import catalogue
from llama_ssp.weights import hub
from tests.helpers.in_process import Ended, launch

pytestmark = pytest.mark.seconds

SIZES = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
}  # fmt: skip


def run(folder: Path, *words: str) -> Ended:
    return launch("max_new_tokens=4", "prompt=import", f"run_dir={folder}/run", *words)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The shipped model, whose config.json says that there is such a layer."""
    folder = shutil.copytree(hub.resolve(catalogue.load("tiny")), tmp_path / "target")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    return folder


def test_the_model_runs_and_its_log_names_what_is_not_read(target: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, "model=local", f"model.path={target}", "draft=tiny-eagle")
    assert ended.code == 0, ended.err
    log = (tmp_path / "run" / "ranks" / "000.log").read_text(encoding="utf-8")
    assert f"continuing without the MTP layers of {target}, which are not read" in log


def test_the_same_checkpoint_as_the_draft_is_answered_with_what_drafts(target: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, "model=local", f"model.path={target}", "draft=local", f"draft.model.path={target}")
    assert ended.code != 0
    assert f"{target} is the target and the draft: its MTP layers are not read as drafts: give an EAGLE-3" in ended.err


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "qwen3_next"}, "this qwen3_next model has layers of kind linear_attention"),
        ({"model_type": "mimo", "auto_map": {"AutoConfig": "a.b"}}, "config.json asks for Python code from its folder"),
        ({"speculators_model_type": "mtp"}, "describes a speculator of type mtp: of those, eagle3 is read"),
    ],
    ids=lambda value: value.get("model_type", "speculator") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("words", ["draft=none task=generate model=local model.path=", "draft=local draft.model.path="])
def test_a_family_that_is_not_read_is_one_sentence(
    config: dict[str, Any], sentence: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config), encoding="utf-8")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    for file in hub.resolve(catalogue.load("tiny")).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    ended = run(tmp_path, *f"{words}{tmp_path}".split())
    assert ended.code != 0
    assert sentence in ended.err
    assert len(ended.err.strip().splitlines()) == 1
