"""Fingerprints: other weights of the same shapes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llama_ssp.weights.hashes import fingerprint

SHARDS = {"model-1.safetensors": ["embed", "norm"], "model-2.safetensors": ["head"]}
SIZES = {"embed": (700, 40), "norm": (3,), "head": (0, 4)}


def write(folder: Path, weights: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(str(folder))
    for file, names in SHARDS.items():
        save_file({name: weights[name] for name in names}, folder / file)
    files = {name: file for file, names in SHARDS.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize(("changed", "file"), [("embed", "model-1.safetensors"), ("norm", "model-1.safetensors")])
def test_the_file_of_a_tensor_with_other_values_differs(changed: str, file: str, tmp_path: Path) -> None:
    weights = {name: torch.zeros(size) for name, size in SIZES.items()}
    write(tmp_path / "a", weights)
    write(tmp_path / "b", weights)
    before = fingerprint(tmp_path / "a")
    assert fingerprint(tmp_path / "b") == before
    assert before.keys() == {"config.json", "model.safetensors.index.json", *SHARDS}
    write(tmp_path / "b", weights | {changed: weights[changed] + 1})
    after = fingerprint(tmp_path / "b")
    assert {name for name in before if before[name] != after[name]} == {file}


def test_of_very_many_tensors_some_are_read_from_the_first_to_the_last_part(tmp_path: Path) -> None:
    names = [f"expert{number:05d}" for number in range(5000)]
    found = set()
    for changed in (range(0), range(3), range(2500, 2503), range(4997, 5000)):
        values = {name: torch.full((2,), float(number in changed)) for number, name in enumerate(names)}
        save_file(values, tmp_path / "model.safetensors")
        found.add(fingerprint(tmp_path)["model.safetensors"])
    assert len(found) == 4
