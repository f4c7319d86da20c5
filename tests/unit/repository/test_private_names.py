"""Private names of other packages stand in one list: each exists, is used, and no other one is used."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.helpers.private_names import PRIVATE_NAMES
from tests.helpers.repository import modules, tree_of

PACKAGES = ("torch", "transformers", "hydra", "omegaconf", "accelerate", "huggingface_hub", "safetensors")
_OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields"}


def find(name: str) -> object:
    """What a dotted name stands for; AttributeError where a part of it is gone."""
    package, *rest = name.split(".")
    found: object = importlib.import_module(package)
    for part in rest:
        path = f"{getattr(found, '__name__', '')}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                raise AttributeError(part) from None
    return found


@cache
def used() -> dict[str, str]:
    """Private names of other packages, with a file that uses each; those of objects begin with a full stop."""
    trees = {path: tree_of(path) for path in modules("llama_ssp", "launch", "training")}
    ours = _OF_NAMED_TUPLES.union(*map(_defined, trees.values()))
    return {name: str(path) for path, tree in trees.items() for name in _foreign(tree, ours)}


def _defined(tree: ast.AST) -> set[str]:
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def _foreign(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    imported = _imports(tree)
    yield from (name for name in imported.values() if _is_foreign(name) and _is_private(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            name = imported.get(root, root)
            if _is_foreign(name) and re.fullmatch(r"[\w.]+", rest):
                yield from [f"{name}.{rest}"] if _is_private(rest) else []
            elif _is_private(node.attr) and node.attr not in ours and name not in sys.stdlib_module_names:
                yield f".{node.attr}"


def _imports(tree: ast.AST) -> dict[str, str]:
    """What each imported name of a module stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.asname: each.name for each in node.names if each.asname}
            found |= {root: root for each in node.names if (root := each.name.partition(".")[0])}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _is_foreign(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def is_listed(name: str) -> bool:
    """Whether a used name, or what it is a part of, is on the list."""
    if name.startswith("."):
        return any(each.endswith(name) for each in PRIVATE_NAMES)
    return any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in PRIVATE_NAMES)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_private_name_on_the_list_exists_in_the_installed_version(name: str) -> None:
    package = importlib.import_module(name.partition(".")[0])
    try:
        find(name)
    except AttributeError:
        used_by = {path for use, path in used().items() if use.rpartition(".")[2] == name.rpartition(".")[2]}
        pytest.fail(f"{package.__name__} {package.__version__} lacks {name} ({PRIVATE_NAMES[name]}), used by {used_by}")


def test_every_private_name_in_use_is_on_the_list() -> None:
    missing = {name: path for name, path in used().items() if not is_listed(name)}
    assert missing == {}, "private names of other packages: add each to tests/helpers/private_names.py, with a reason"


def test_every_name_on_the_list_is_in_use() -> None:
    uses = tuple(f"{name}." for name in used())
    idle = [
        name
        for name in PRIVATE_NAMES
        if not any(use.startswith(f"{name}.") for use in uses) and f".{name.split('.')[-1]}." not in uses
    ]
    assert idle == [], "no file uses these any more: remove them from tests/helpers/private_names.py"
