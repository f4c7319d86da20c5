"""Finds the entry of the group `hardware` that describes the current machine, and the links between its GPUs."""

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError
from llama_ssp.machines import hardware
from llama_ssp.machines.hardware import HardwareConfig, Speed

THIS_MACHINE = "this_machine"  # Name of the hardware file that `task=calibrate` writes.
_OTHER_BOARDS = {"PCIE", "NVL", "MIG", "TI", "SUPER", "D", "LAPTOP", "MAX", "144G"}
"""Variants of a GPU with another bandwidth or memory."""
_LAPTOP_CORES = 8
"""Cores of laptop_cpu; other CPUs get its rates in proportion to their cores."""
_BY_A_RUN, _DISTURBED, _AGAIN_S = "measured by a run on this machine", "disturbed", 3600.0
_LINKS_S = 20.0
_LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Beginnings of the names of links, the fastest first: NVLink, PCIe switches, host bridges, and sockets."""


def detect_hardware(*, on_cpu: bool = False) -> HardwareConfig:
    """Describe the current machine, without its GPUs if `on_cpu`.

    In order of precedence: what `task=calibrate` wrote, the entry for the GPUs that nvidia-smi lists (ConfigError if
    there is none), and a CPU with this machine's memory and number of cores, and with its speed once a run has measured
    that.
    """
    gpus = [] if on_cpu else _gpu_names()
    if THIS_MACHINE in hardware.names():
        measured = hardware.load(THIS_MACHINE)
        if not (on_cpu if measured.device == "cuda" else gpus):
            return measured
    if not gpus:
        name, kind, memory = platform.node(), platform.machine(), host_memory_bytes()
        laptop, speeds = hardware.load("laptop_cpu"), known_speeds()
        share = (os.cpu_count() or 1) / _LAPTOP_CORES
        found = replace(
            laptop,
            name=name,
            gpu=kind,
            memory_bytes=memory,
            system_bytes=system_bytes(memory),
            flops_per_s={name: share * rate for name, rate in laptop.flops_per_s.items()},
        )
        of_weights = [speed for name, speed in speeds.items() if name != hardware.ATTENTION]
        if not of_weights:
            return found
        figures = ("products", "copy_bytes_per_s", "flops_per_s")
        return replace(
            found,
            products=speeds,
            copy_bytes_per_s=max(speed.bytes_per_s for speed in of_weights),
            flops_per_s=dict.fromkeys(laptop.flops_per_s, median(speed.flops_per_s for speed in of_weights)),
            sources=laptop.sources | dict.fromkeys(figures, _BY_A_RUN),
        )
    files = {name: catalogue.find("hardware", name) for name in hardware.names()}
    own = {name for name, file in files.items() if file and catalogue.is_own(file)}
    entries = map(hardware.load, files)
    for entry in sorted(entries, key=lambda one: (one.name not in own, one.num_gpus > 1)):
        if _describes(entry, gpus[0]) and (entry.num_gpus == 1 or entry.num_gpus >= len(gpus)):
            name = f"{len(gpus)}x{entry.name}" if entry.num_gpus == 1 < len(gpus) else entry.name
            return replace(entry, name=name, num_gpus=len(gpus))
    raise ConfigError(
        f"no entry of conf/hardware describes {len(gpus)} x {gpus[0]}: run task=calibrate once, or give hardware=NAME"
    )


def known_speeds() -> dict[str, Speed]:
    """The speeds of this machine's CPU by format, if `keep_speeds` has kept them here."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        kept = json.loads(_speeds().read_text(encoding="utf-8")).get(platform.node())
        speeds = {name: Speed(**speed) for name, speed in kept.items()}
        figures = [figure for speed in speeds.values() for figure in vars(speed).values()]
        return speeds if all(type(figure) is float and figure > 0 for figure in figures) else {}
    return {}


def speeds_are_due() -> bool:
    """Whether a run should measure this CPU: no run has, or other programs disturbed the last one, an hour ago."""
    found = detect_hardware(on_cpu=True)
    if found.sources.get("products") != _BY_A_RUN:
        return not found.products
    with suppress(OSError, ValueError, LookupError):
        was_disturbed = json.loads(_speeds().read_text(encoding="utf-8"))[_DISTURBED]
        return bool(was_disturbed) and time.time() - _speeds().stat().st_mtime > _AGAIN_S
    return False


def keep_speeds(speeds: Mapping[str, Speed], *, were_disturbed: bool = False) -> None:
    """Keep the speeds that a run has measured, for plans and later runs; do nothing if they cannot be written."""
    with suppress(OSError):
        _speeds().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {name: vars(speed) for name, speed in speeds.items()}
        _speeds().write_text(json.dumps({platform.node(): kept, _DISTURBED: were_disturbed}) + "\n", encoding="utf-8")


def _speeds() -> Path:
    return catalogue.cache_dir() / "speed.json"


def machine_of_run(machine: HardwareConfig, world_size: int) -> HardwareConfig:
    """Return the part of a machine that a run uses: one GPU per rank, on as few nodes as possible.

    The ranks of a CPU share its memory and its cores.
    """
    if machine.device == "cpu":
        share = machine.num_gpus / world_size
        return replace(
            machine,
            num_gpus=world_size,
            num_nodes=1,
            bandwidth_bytes_per_s=share * machine.bandwidth_bytes_per_s,
            copy_bytes_per_s=machine.copy_bytes_per_s and share * machine.copy_bytes_per_s,
            flops_per_s={name: share * rate for name, rate in machine.flops_per_s.items()},
            products={
                name: Speed(bytes_per_s=share * speed.bytes_per_s, flops_per_s=share * speed.flops_per_s)
                for name, speed in machine.products.items()
            },
        )
    return replace(machine, num_nodes=-(-world_size // machine.num_gpus))


def _describes(entry: HardwareConfig, driver_name: str) -> bool:
    """Whether an entry matches the driver's name: the same chip and memory size, on the same board."""
    chip, *others = entry.gpu.upper().split("-")
    words = set(re.split(r"[\s-]+", driver_name.upper()))
    sizes = {word for word in words if re.fullmatch(r"\d+GB", word)}
    is_other = bool(words & _OTHER_BOARDS - set(others))
    return entry.device == "cuda" and set(chip.split()) <= words and sizes <= set(others) and not is_other


def _gpu_names() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []


def system_bytes(memory_bytes: int) -> int:
    """The operating system's share of a machine's memory: as much as on a laptop, at most an eighth."""
    return min(hardware.load("laptop_cpu").system_bytes, memory_bytes // 8)


def host_memory_bytes() -> int:
    """Total memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def read_links() -> list[list[str]]:
    """The name of the link between each two GPUs, by their numbers; OSError with a reason if none can be read."""
    command = shutil.which("nvidia-smi")
    if command is None:
        raise OSError("nvidia-smi is not installed")
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, check=True, timeout=_LINKS_S)
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
    """Return a sentence if ranks that share a model would have faster links in another order of their GPUs.

    The `num_ranks` ranks on this node share models in blocks, of one of `sizes` each; `visible` is
    CUDA_VISIBLE_DEVICES. Returns None too if the links are unknown, or GPUs have no numbers.
    """
    gpus = visible.split(",") if visible else [*map(str, range(num_ranks))]
    with suppress(OSError, ValueError, IndexError):
        links, ranks = read_links(), [*map(int, gpus)][:num_ranks]

        def weakest(block: Iterable[int]) -> tuple[int, str]:
            found = [links[one][other] for one, other in combinations(block, 2)]
            return max(([link.startswith(name) for name in _LINKS].index(True), link) for link in found)

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
