"""Manifests: what is written and noticed, and what the command says. Fingerprints: other weights of the same shapes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llama_ssp.errors import CheckpointError
from llama_ssp.run.commands import manifest as command
from llama_ssp.weights.hashes import MANIFEST_FILE, fingerprint, verify, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files, one of them below and one hidden."""
    folder = tmp_path / "checkpoint"
    (folder / "below").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "below/more.json", ".hidden"):
        (folder / name).write_text(name)
    return folder


def test_a_manifest_names_every_file_but_itself_and_hidden_ones(folder: Path) -> None:
    assert write_manifest(folder) == 3
    hashes = json.loads((folder / MANIFEST_FILE).read_text())
    assert list(hashes) == ["below/more.json", "config.json", "model.safetensors"]
    assert all(len(value) == 64 for value in hashes.values())
    (folder / ".hidden").write_text("changed")
    verify(folder)


def test_a_manifest_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    assert command.main([str(folder), f"--output={tmp_path}/hashes.json"]) == 0
    assert not (folder / MANIFEST_FILE).exists()
    verify(folder, tmp_path / "hashes.json")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("below/more.json", "changed", "below/more.json differs"),
        ("config.json", None, "config.json is missing"),
        ("new.json", "new", "new.json is not in the manifest"),
        (MANIFEST_FILE, None, "verify=true needs it, .* llama-ssp manifest"),
        (MANIFEST_FILE, "{", "is not JSON"),
        (MANIFEST_FILE, "{}", "is no manifest"),
        (MANIFEST_FILE, '{"config.json": 3}', "is no manifest"),
    ],
)
def test_every_difference_is_named(folder: Path, name: str, content: str | None, reason: str) -> None:
    write_manifest(folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        verify(folder)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: DIR; usage: llama-ssp manifest DIR [--"),
        ([".", "."], "unrecognized arguments: .; usage:"),
        (["--outptu=x", "."], "unrecognized arguments: --outptu=x; usage:"),
        (["--out=x", "."], "unrecognized arguments: --out=x; usage:"),
        (["nowhere"], "nowhere does not exist"),
        ([".", "--output=nowhere/x"], "nowhere/x cannot be written"),
    ],
)
def test_a_mistake_is_one_sentence_with_code_2(
    arguments: list[str],
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1


def test_help_says_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "--output=FILE" in capsys.readouterr().out


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
