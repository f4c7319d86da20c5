"""What help says of settings is read from the comments of their dataclasses, wherever their modules are."""

import importlib
import py_compile
import zipfile
from pathlib import Path

import pytest

from llama_ssp.settings.described import meanings, settings_of
from llama_ssp.settings.schema import ModelConfig

PLUGIN = """from dataclasses import dataclass

@dataclass
class Words:
    # how many,
    # at least.
    least: int = 1
    most: int = 2  # or at most.
    other: int = 3
"""


@pytest.fixture(params=["source", "zip", "bytecode"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a plugin on the path, named by its form: a file, in an archive, or without its source."""
    name = f"words_{request.param}"
    source = tmp_path / f"{name}.py"
    source.write_text(PLUGIN)
    folder = tmp_path / "path"
    if request.param == "zip":
        with zipfile.ZipFile(folder, "w") as archive:
            archive.write(source, source.name)
    else:
        folder.mkdir()
        source.rename(folder / source.name)
    if request.param == "bytecode":
        py_compile.compile(str(folder / source.name), cfile=str(folder / f"{name}.pyc"))
        (folder / source.name).unlink()
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_fields_have_the_comments_above_and_behind_them(place: str) -> None:
    kind = importlib.import_module(place).Words
    said = {"least": "how many, at least.", "most": "or at most.", "other": ""}
    found = {each.key: each.meaning for each in settings_of(kind)}
    assert found == (dict.fromkeys(said, "") if place == "words_bytecode" else said)


def test_what_no_file_defines_has_no_meaning() -> None:
    namespace: dict[str, object] = {"__name__": "nowhere"}
    exec("from dataclasses import dataclass\n@dataclass\nclass Words:\n    least: int = 1\n", namespace)
    assert meanings(namespace["Words"]) == {}  # type: ignore[arg-type]


def test_what_only_files_say_is_no_setting() -> None:
    keys = [each.key for each in settings_of(ModelConfig, "model.")]
    assert "model.quantization" in keys
    assert not any("stored_format" in key for key in keys)
