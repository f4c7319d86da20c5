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


def test_the_model_runs_names_what_is_not_read_and_is_not_its_own_draft(tmp_path: Path) -> None:
    """The shipped model, whose config.json says that there is such a layer."""
    target = shutil.copytree(hub.resolve(catalogue.load("tiny")), tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    local = ("model=local", f"model.path={target}")
    ended = run(tmp_path, *local, "draft=tiny-eagle")
    assert ended.code == 0, ended.err
    log = (tmp_path / "run" / "ranks" / "000.log").read_text()
    assert f"continuing without the MTP layers of {target}, which are not read" in log
    refused = run(tmp_path / "own", *local, "draft=local", f"draft.model.path={target}")
    assert refused.code == 2
    assert f"{target} is the target and the draft: its MTP layers are not read as drafts: give an EAGLE" in refused.err


@pytest.mark.parametrize(
    ("words", "config", "sentence"),
    [
        ("model=local model.path=", {"model_type": "qwen3_next"}, "this qwen3_next model has layers of kind linear_"),
        ("draft=local draft.model.path=", {"model_type": "mimo", "auto_map": {"AutoConfig": "a.b"}},
         "config.json asks for Python code from its folder"),
        ("draft=local draft.model.path=", {"speculators_model_type": "mtp"},
         "describes a speculator of type mtp: of those, eagle3 is read"),
    ],
    ids=["linear attention", "code", "speculator"],
)  # fmt: skip
def test_a_family_that_is_not_read_is_one_sentence(
    words: str, config: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    for file in hub.resolve(catalogue.load("tiny")).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    ended = run(tmp_path, "task=generate", *f"{words}{tmp_path}".split())
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert sentence in ended.err
