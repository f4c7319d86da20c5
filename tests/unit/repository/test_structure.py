"""Holds the tree to the habits that no linter knows: docstrings, one name for one thing, nothing of one machine."""

import ast
import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from tests.helpers.repository import PYTHON_FOLDERS, ROOT, files, modules, tree_of

MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
INSTALL_FILES = re.compile(r"pyproject\.toml|constraints.*\.txt|machine-install\.sh|\.ci/run|justfile|\.pre-commit.*")
PUBLIC_HOSTS = {"download.pytorch.org"}
RECORDS = re.compile(
    r"cpu\.tracing|is_recording|engine\.executors|torch\.jit|torch\._C|CUDAGraph|cuda\.graph|capturing"
)
KNOW_RECORDING = (
    "llama_ssp/speculate/engine/executors.py",
    "llama_ssp/cpu/",
    "llama_ssp/run/decoders.py",
    "llama_ssp/run/calibration/",
)
"""Executors and who makes them, and what times pieces as executors run them."""


def test_every_python_file_opens_with_a_docstring() -> None:
    trees = {path: tree_of(path) for path in modules(*PYTHON_FOLDERS)}
    assert [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {
        path: match.group()
        for path in files()
        if (match := MACHINE_PATH.search((ROOT / path).read_text(errors="ignore")))
    }
    assert found == {}


def test_packages_come_from_public_hosts_alone() -> None:
    install_files = [path for path in files() if INSTALL_FILES.fullmatch(str(path))]
    urls = {url for path in install_files for url in re.findall(r"\w+://[^\s\"')]*", (ROOT / path).read_text())}
    assert {urlsplit(url).hostname for url in urls} <= PUBLIC_HOSTS


def test_no_public_class_has_the_name_of_another() -> None:
    trees = [tree_of(path) for path in modules("llama_ssp")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1 and not name.startswith("_")] == []


def test_only_executors_and_collectives_know_of_tracing_and_capture() -> None:
    knowing = [str(path) for path in modules("llama_ssp") if RECORDS.search(_code(ROOT / path))]
    assert [path for path in knowing if not path.startswith(KNOW_RECORDING)] == []
    assert "llama_ssp/speculate/engine/executors.py" in knowing


def _code(path: Path) -> str:
    """The source of a module without docstrings and comments."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(0)
    return ast.unparse(tree)
