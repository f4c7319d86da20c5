"""Manifests: what is written, what is noticed, and what the command says."""

import json
from pathlib import Path

import pytest

from llama_ssp.errors import CheckpointError
from llama_ssp.run.commands import manifest as command
from llama_ssp.weights.hashes import MANIFEST_FILE, verify, write_manifest


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
        (
            [],
            "the following arguments are required: DIR; usage: llama-ssp manifest DIR [--",
        ),
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
