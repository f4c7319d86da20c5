"""Whatever decides the code of a kernel is part of the key under which the code is kept."""

import ast
from collections.abc import Iterator
from pathlib import Path

from llama_ssp import cpu_kernels
from llama_ssp.cpu_kernels import compiled
from tests.helpers.repository import ROOT

FOLDER = Path(cpu_kernels.__file__).parent


def imported(file: Path) -> Iterator[Path]:
    """The modules of this project that a file imports from; a name of a package may be one of its modules."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("llama_ssp."):
            path = ROOT.joinpath(*node.module.split("."))
            module = path.with_suffix(".py")
            yield from [module] if module.is_file() else [path / f"{alias.name}.py" for alias in node.names]


def test_the_key_holds_the_sources_of_the_kernels_and_of_all_that_they_import() -> None:
    kernels = sorted(FOLDER.glob("*.py"))
    sources = {*kernels, *(found for file in kernels for found in imported(file))}
    assert ROOT / "llama_ssp/weights/int4_rows.py" in sources
    assert [file.name for file in sorted(sources) if file.read_text() not in compiled._decides_code()] == []
