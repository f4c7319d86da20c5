"""The origin of a run: package versions, the commit, the processor, and the links between GPUs.

Imports none of the packages, and queries GPUs only through `nvidia-smi`.
"""

import platform
import re
import shutil
import subprocess
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path

_PACKAGES = ("torch", "transformers", "llama_ssp")
_SOURCE_TREE = Path(__file__).parents[2]
_TOPOLOGY_TIMEOUT_S = 20.0
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


def gpu_links() -> str:
    """Return the link between each pair of this node's GPUs, from `nvidia-smi topo -m`."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown: nvidia-smi is not installed"
    try:
        done = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, check=True, timeout=_TOPOLOGY_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        return f"unknown: {error}"
    rows = [re.split(r"[\t ]+", line.strip()) for line in done.stdout.splitlines()]
    links = [row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = defaultdict(list)
    for first, second in combinations(range(len(links)), 2):
        pairs[links[first][second]].append(f"{first}-{second}")
    if len(pairs) == 1:
        return f"{next(iter(pairs))} between all GPUs"
    return ", ".join(f"{link} between GPUs {' '.join(pairs[link])}" for link in pairs) or "none, the GPU is alone"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
