"""The shape of the package: one name for one thing, and who knows of tracing and capture."""

import ast
import re
from collections import Counter
from pathlib import Path

from tests.helpers.repository import ROOT, modules

RECORDS = re.compile(r"engine\.(tracing|executors)|torch\.jit|torch\._C|CUDAGraph|cuda\.graph|capturing")
KNOW_RECORDING = (
    "llama_ssp/speculate/engine/executors.py",
    "llama_ssp/speculate/engine/tracing.py",
    "llama_ssp/run/decoders.py",
    "llama_ssp/ranks/comms.py",
    "llama_ssp/run/calibration/",
)
"""Executors and who makes them, the collectives' operators, and what times pieces as executors run them."""


def test_no_public_class_has_the_name_of_another() -> None:
    trees = [ast.parse((ROOT / path).read_text()) for path in modules("llama_ssp")]
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
