"""The origin of a run: package versions, the commit, the processor, and the links between GPUs.

Imports none of the packages, and queries GPUs only through `nvidia-smi`.
"""

import platform
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llama_ssp.config.machines.hardware import HardwareConfig

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
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    pairs = defaultdict(list)
    for link, pair in _links(done.stdout):
        pairs[link].append(pair)
    if len(pairs) == 1:
        return f"{next(iter(pairs))} between all GPUs"
    return ", ".join(f"{link} between GPUs {' '.join(pairs[link])}" for link in pairs) or "none, the GPU is alone"


def planned_link(machine: HardwareConfig) -> str:
    """Return the forecast's figures for the links inside a node, and their source."""
    link, sources = machine.link, machine.sources
    source = sources.get("link") or sources.get("link.bandwidth_bytes_per_s") or "no source given"
    return f"links of {link.bandwidth_bytes_per_s / 1e9:.4g} GB/s and {1e6 * link.latency_s:.3g} us ({source})"


def _links(matrix: str) -> Iterator[tuple[str, str]]:
    """Yield the kind of link and the two GPUs of each pair, such as NV18 and 0-1, from the matrix."""
    rows = [re.split(r"[\t ]+", line.strip()) for line in matrix.splitlines()]
    links = {row[0]: row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0]) and "X" in row}
    for number, row in enumerate(links.values()):
        for other, link in enumerate(row[number + 1 : len(links)], start=number + 1):
            yield link, f"{number}-{other}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
