"""Compiled code is kept under a key of all that decides it, and used only as it was kept."""

import ast
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from llama_ssp.extensions.cpu import code
from llama_ssp.extensions.cpu.code import compiled
from llama_ssp.extensions.cpu.code.compiled import keep
from tests.helpers.repository import ROOT

FOLDER = Path(code.__file__).parent


@pytest.fixture(name="made")
def _made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """What each call of a compiler gives: other code every time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return (b"code %d" % number for number in count())


def kept(folder: Path) -> Path:
    (file,) = (folder / "llama_ssp" / "kernels").iterdir()
    return file


def test_code_is_made_once_for_a_key(made: Iterator[bytes]) -> None:
    found = [keep("product", key, lambda: next(made)) for key in ("a", "a", "b", "a")]
    assert found == [b"code 0", b"code 0", b"code 1", b"code 0"]


def test_damaged_code_is_made_again(made: Iterator[bytes], tmp_path: Path) -> None:
    keep("product", "a", lambda: next(made))
    file = kept(tmp_path)
    for number, damaged in enumerate([b"", file.read_bytes()[:-1], file.read_bytes() + b"x"], start=1):
        file.write_bytes(damaged)
        found = [keep("product", "a", lambda: next(made)) for _ in range(2)]
        assert found == [b"code %d" % number] * 2, "made again, and kept"


@pytest.mark.parametrize("is_folder", [True, False])
def test_code_that_others_may_write_is_made_again(made: Iterator[bytes], tmp_path: Path, *, is_folder: bool) -> None:
    keep("product", "a", lambda: next(made))
    open_to_all = kept(tmp_path).parent if is_folder else kept(tmp_path)
    open_to_all.chmod(0o777)
    assert keep("product", "a", lambda: next(made)) == b"code 1"


def test_code_is_made_where_nothing_can_be_kept(
    made: Iterator[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [keep("product", "a", lambda: next(made)) for _ in range(2)] == [b"code 0", b"code 1"]


def imported(file: Path) -> Iterator[Path]:
    """The modules of this project that a file imports from; a name of a package may be one of its modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llama_ssp."):
            path = ROOT.joinpath(*node.module.split("."))
            module = path.with_suffix(".py")
            yield from [module] if module.is_file() else [path / f"{alias.name}.py" for alias in node.names]


def test_the_key_holds_the_sources_of_the_kernels_and_of_all_that_they_import() -> None:
    kernels = [FOLDER / f"{name}.py" for name in ("emit", "attention", "draw", "layer", "linear", "kinds")]
    sources = {*kernels, *(found for file in kernels for found in imported(file))}
    assert ROOT / "llama_ssp/storage/formats.py" in sources
    assert [file.name for file in sorted(sources) if file.read_text() not in compiled._decides_code()] == []
