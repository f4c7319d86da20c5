"""What made a run: versions of packages, the commit of the source tree, the processor, and what connects the GPUs.

Imports none of the packages, and reaches no GPU but through `nvidia-smi`.
"""

import platform
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llama_ssp.config.hardware import HardwareConfig

_PACKAGES = ("torch", "transformers", "llama_ssp")
_SOURCE_TREE = Path(__file__).parents[2]
_TOPOLOGY_TIMEOUT_S = 20.0
_CPUINFO = Path("/proc/cpuinfo")


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


def processor() -> str:
    """Name this machine's processor as Linux does; elsewhere as Python does."""
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpu_links() -> str:
    """Name what connects the GPUs of this node, pair by pair, as `nvidia-smi topo -m` does."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "not told: there is no nvidia-smi here"
    try:
        told = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, check=True, timeout=_TOPOLOGY_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        return f"not told: {error}"
    pairs = defaultdict(list)
    for link, pair in _links(told.stdout):
        pairs[link].append(pair)
    if len(pairs) == 1:
        return f"{next(iter(pairs))} between all GPUs"
    return ", ".join(f"{link} between GPUs {' '.join(pairs[link])}" for link in pairs) or "none, the GPU is alone"


def planned_link(machine: HardwareConfig) -> str:
    """Say what a forecast takes the links inside a node for, and who says so."""
    link, sources = machine.link, machine.sources
    source = sources.get("link") or sources.get("link.bandwidth_bytes_per_s") or "nobody says why"
    return f"links of {link.bandwidth_bytes_per_s / 1e9:.4g} GB/s and {1e6 * link.latency_s:.3g} us ({source})"


def _links(matrix: str) -> Iterator[tuple[str, str]]:
    """Read the kind of link and the two GPUs of each pair, such as NV18 and 0-1, out of the matrix."""
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
