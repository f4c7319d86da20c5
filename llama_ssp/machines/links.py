"""Links between the GPUs of a node, from `nvidia-smi topo -m`: NVLink pairs, PCIe switches and sockets."""

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from itertools import combinations

_TIMEOUT_S = 20.0
_NAMES = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Beginnings of the names of links, the fastest first: NVLink, PCIe switches, host bridges, and sockets."""


@cache
def read_links() -> list[list[str]]:
    """The name of the link between each two GPUs, by their numbers; OSError with a reason if none can be read."""
    command = shutil.which("nvidia-smi")
    if command is None:
        raise OSError("nvidia-smi is not installed")
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    rows = [re.split(r"[\t ]+", line.strip()) for line in done.stdout.splitlines()]
    return [row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0]) and "X" in row]


def gpu_links() -> str:
    """Return the link between each pair of this node's GPUs."""
    try:
        links = read_links()
    except OSError as error:
        return f"unknown: {error}"
    pairs = defaultdict(list)
    for first, second in combinations(range(len(links)), 2):
        pairs[links[first][second]].append(f"{first}-{second}")
    if len(pairs) == 1:
        return f"{next(iter(pairs))} between all GPUs"
    return ", ".join(f"{link} between GPUs {' '.join(pairs[link])}" for link in pairs) or "none, the GPU is alone"


def note_on_links(sizes: Collection[int], num_ranks: int, visible: str | None) -> str | None:
    """A sentence if ranks that share a model would have faster links in another order of their GPUs.

    Blocks of one of `sizes` share one, of `num_ranks` on this node; `visible` is CUDA_VISIBLE_DEVICES. None too where
    the links are unknown, or GPUs have no numbers.
    """
    gpus = visible.split(",") if visible else [*map(str, range(num_ranks))]
    with suppress(OSError, ValueError, IndexError):
        links, ranks = read_links(), [*map(int, gpus)][:num_ranks]

        def weakest(block: Iterable[int]) -> tuple[int, str]:
            found = [links[one][other] for one, other in combinations(block, 2)]
            return max(([link.startswith(name) for name in _NAMES].index(True), link) for link in found)

        for size in (size for size in sizes if size > 1 and num_ranks % size == 0):
            order = list[int]()
            while len(order) < num_ranks:
                left = (gpu for gpu in ranks if gpu not in order)
                order += min(combinations(left, size), key=lambda block: weakest(block)[0])
            blocks = [[one[at : at + size] for at in range(0, len(order), size)] for one in (ranks, order)]
            now, best = (max(map(weakest, some)) for some in blocks)
            if best[0] < now[0]:
                return (
                    f"{size} ranks that share a model have {now[1]} between their GPUs, and in another order "
                    f"{best[1]}: CUDA_VISIBLE_DEVICES={','.join(map(str, order))}; nvidia-smi topo -m explains"
                )
    return None
