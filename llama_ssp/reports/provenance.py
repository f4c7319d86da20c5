"""Which software made a run: versions of packages and the commit of the source tree, without importing any of them."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "llama_ssp")
_SOURCE_TREE = Path(__file__).parents[2]


def versions() -> dict[str, str | None]:
    """Name the versions of Python, torch, transformers and this package; None for one that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


def git_commit(source_tree: Path = _SOURCE_TREE) -> str | None:
    """Name the commit (40 hex digits) that a source tree stands at; None outside a git checkout."""
    git = shutil.which("git")
    if git is None or not (source_tree / ".git").exists():
        return None
    command = [git, "-C", str(source_tree), "rev-parse", "--verify", "--quiet", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
