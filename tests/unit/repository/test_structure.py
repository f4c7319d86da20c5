"""Holds the tree to its habits: docstrings, names, private names of libraries, pins, lanes, one-way imports."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from llama_ssp import manifest
from llama_ssp.manifest import present
from tests.helpers.extensions import need
from tests.helpers.lanes import grid, meeting
from tests.helpers.private_names import PRIVATE_NAMES
from tests.helpers.repository import PYTHON_FOLDERS, ROOT, files, modules, tree_of

MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
INSTALL_FILES = re.compile(r"pyproject\.toml|constraints.*\.txt|machine-install\.sh|\.ci/run|justfile|\.pre-commit.*")
PUBLIC_HOSTS = {"download.pytorch.org"}
RECORDS = re.compile(
    r"extensions\.cpu\.tracing|is_recording|engine\.executors|torch\.jit|torch\._C|CUDAGraph|cuda\.graph|capturing"
)
KNOW_RECORDING = (
    "llama_ssp/speculate/engine/executors.py",
    "llama_ssp/extensions/cpu/",
    "llama_ssp/run/decoders.py",
    "llama_ssp/extensions/calibrate/measures.py",
)
"""Executors and who makes them, and what times pieces as executors run them."""


@pytest.mark.seconds
def test_every_python_file_opens_with_a_docstring() -> None:
    trees = {path: tree_of(path) for path in modules(*PYTHON_FOLDERS)}
    assert [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


@pytest.mark.seconds
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


@pytest.mark.seconds
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
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
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


@pytest.mark.seconds
def test_every_private_name_in_use_is_on_the_list() -> None:
    missing = {name: path for name, path in used().items() if not is_listed(name)}
    assert missing == {}, "private names of other packages: add each to tests/helpers/private_names.py, with a reason"


def test_every_name_on_the_list_is_in_use() -> None:
    for extension in manifest.EXTENSIONS:
        need(extension)
    uses = tuple(f"{name}." for name in used())
    idle = [
        name
        for name in PRIVATE_NAMES
        if not any(use.startswith(f"{name}.") for use in uses) and f".{name.split('.')[-1]}." not in uses
    ]
    assert idle == [], "no file uses these any more: remove them from tests/helpers/private_names.py"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    """Read a constraints file: the version of each package."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


def ranges() -> dict[str, SpecifierSet]:
    """Read pyproject.toml: what each other package may be, the extras included."""
    lines = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    found = [requirement for requirement in map(Requirement, lines) if requirement.name != PROJECT["name"]]
    return {canonicalize_name(requirement.name): requirement.specifier for requirement in found}


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins("constraints.txt")
    assert {name for name, allowed in ranges().items() if name not in pinned or pinned[name] not in allowed} == set()


def test_the_lowest_pins_are_the_lower_ends_of_the_ranges() -> None:
    lowest = {name: version for name, version in pins("constraints-lowest.txt").items() if name in ranges()}
    assert {
        name for name, version in lowest.items() if f">={version.removesuffix('.0')}" not in str(ranges()[name])
    } == set()


def test_in_a_grid_every_value_runs_always_every_two_meet_with_heavy_and_no_case_is_lost() -> None:
    axes: dict[str, Any] = {"a": [1, 2, 3], "b": "xyz", "c": [False, True], "d": [None, 5]}
    cases = grid(**axes).args[1]
    assert sorted(map(str, (case.values for case in cases))) == sorted(map(str, product(*axes.values())))
    some = grid(where=lambda a, c, **_: a < 3 or c, **axes).args[1]
    assert [case.values for case in some] == [case.values for case in cases if case.values[0] < 3 or case.values[2]]
    for num_values, lanes, most in ((1, set[str](), 4), (2, {"heavy"}, 12)):
        chosen = [case.values for case in cases if {mark.name for mark in case.marks} <= lanes]
        assert len(chosen) <= most
        for places in combinations(range(4), num_values):
            wanted = set(product(*([*axes.values()][place] for place in places)))
            assert {tuple(case[place] for place in places) for case in chosen} == wanted


def test_parts_that_are_in_one_value_meet_with_heavy_as_well() -> None:
    values = ["x", "a b", "a b c", "b c", "c d", "d", "a c d"]
    cases: list[Any] = meeting(values, str.split, always=2)
    lanes = {getattr(case, "values", (case,))[0]: {m.name for m in getattr(case, "marks", ())} for case in cases}
    assert [*lanes] == values
    assert [value for value, names in lanes.items() if not names] == values[:2]
    chosen = [value for value, names in lanes.items() if names <= {"heavy"}]
    assert len(chosen) == 4
    assert all(any({*two} <= {*value.split()} for value in chosen) for two in ("ab", "ac", "bc", "cd", "ad"))


LINTER = Path(sys.executable).parent / "lint-imports"


def lint(folder: Path) -> str:
    """Run import-linter over the packages in `folder`; an empty string when every contract is kept."""
    wide = {**os.environ, "COLUMNS": "200"}
    result = subprocess.run([LINTER, "--no-cache"], cwd=folder, env=wide, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


NO_TORCH = "planning, reports, machines, terminal, architectures, settings and errors"
BACKENDS = "bitsandbytes, deepspeed, accelerate, llguidance, llvmlite and the server"


@pytest.mark.seconds
def test_the_import_contracts_hold() -> None:
    assert lint(ROOT) == ""


FAULTS = [
    ("llama_ssp/models/loading.py", "llama_ssp.run.tasks", "Imports run one way"),
    ("llama_ssp/speculate/sampling/processors.py", "llama_ssp.models", "Imports run one way"),
    ("llama_ssp/machines/hardware.py", "llama_ssp.settings.schema", "Imports run one way"),
    ("llama_ssp/run/commands/run.py", "llama_ssp.run.commands.program", "commands have no circle"),
    ("llama_ssp/architectures/matrices.py", "torch", NO_TORCH),
    ("llama_ssp/settings/checks.py", "transformers", NO_TORCH),
    ("llama_ssp/terminal/terminal.py", "llama_ssp.speculate.engine", "Imports run one way"),
    ("llama_ssp/settings/checks.py", "omegaconf", "hydra and omegaconf are known to"),
    ("llama_ssp/models/runner.py", "bitsandbytes", BACKENDS),
    ("llama_ssp/kernels/linear.py", "llvmlite", BACKENDS),
    *(
        ("llama_ssp/run/pipeline.py", f"llama_ssp.extensions.{extension}.records", "nothing imports an extension")
        for extension in present()
    ),
]


@pytest.mark.seconds
def test_every_forbidden_import_is_found(tmp_path: Path) -> None:
    for path in [Path("pyproject.toml"), *modules("llama_ssp", "launch")]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for module, imported, _ in FAULTS:
        with (tmp_path / module).open("a") as file:
            file.write(f"\nimport {imported}\n")
    broken = re.split(r"\n(?=\S.*\n-+\n)", lint(tmp_path).partition("Broken contracts")[2])
    for module, imported, contract in FAULTS:
        said = [section for section in broken if section.lstrip().startswith(contract)]
        name = module.removesuffix(".py").replace("/", ".")
        assert [section for section in said if f"{name} -> {imported}" in section], (module, imported)
