"""The origin of a run: package versions, the commit, and the processor. Imports none of the packages."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "llama_ssp")
_SOURCE_TREE = Path(__file__).parents[2]
_CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, transformers and this package; None for one that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


def git_commit(source_tree: Path = _SOURCE_TREE) -> str | None:
    """Return the commit (40 hex digits) of a source tree; None outside a git checkout."""
    git = shutil.which("git")
    if git is None or not (source_tree / ".git").exists():
        return None
    command = [git, "-C", str(source_tree), "rev-parse", "--verify", "--quiet", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def processor() -> str:
    """Return the name of this machine's processor, from /proc/cpuinfo if it exists."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
