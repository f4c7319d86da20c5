"""The files of this repository, as the tests that hold its rules see them."""

import ast
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("llama_ssp", "launch", "training", "benchmarks", "tests", "docs")


@cache
def files() -> tuple[Path, ...]:
    """Every file that is or could be committed, relative to ROOT; skips the test in a copy without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git does not list the files here: {error}")
    return tuple(Path(line) for line in listing.splitlines() if (ROOT / line).is_file())


def modules(*folders: str) -> list[Path]:
    """Every Python file below these top-level folders, relative to ROOT."""
    return [path for path in files() if path.suffix == ".py" and path.parts[0] in folders]


@cache
def tree_of(path: Path) -> ast.Module:
    """What a Python file holds, parsed once for all tests; none of them changes it."""
    return ast.parse((ROOT / path).read_text())
