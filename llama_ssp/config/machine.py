"""Which entry of conf/hardware describes the machine at hand."""

import os
import platform
import re
import shutil
import subprocess
from dataclasses import replace

from llama_ssp.config import hardware
from llama_ssp.config.hardware import HardwareConfig
from llama_ssp.errors import ConfigError

THIS_MACHINE = "this_machine"
"""Name of the hardware file that `task=calibrate` writes."""
_SLOWER_BOARDS = {"PCIE", "NVL", "MIG"}
"""Forms of a GPU that have less than its full bandwidth, or another memory."""


def detect_hardware(*, on_cpu: bool = False) -> HardwareConfig:
    """Describe the machine at hand.

    What `task=calibrate` wrote here counts first, then the entry of the GPUs that nvidia-smi names, then a CPU with
    this machine's memory.

    Args:
        on_cpu: whether GPUs are to be left alone.

    Raises:
        ConfigError: no entry describes these GPUs.
    """
    gpus = [] if on_cpu else _gpu_names()
    if THIS_MACHINE in hardware.names():
        measured = hardware.load(THIS_MACHINE)
        if not (on_cpu if measured.device == "cuda" else gpus):
            return measured
    if not gpus:
        name, kind = platform.node(), platform.machine()
        return replace(hardware.load("laptop_cpu"), name=name, gpu=kind, memory_bytes=host_memory_bytes())
    for entry in map(hardware.load, hardware.names()):
        if _describes(entry, gpus[0]) and entry.num_gpus >= len(gpus):
            return replace(entry, num_gpus=len(gpus))
    message = (
        f"no entry of conf/hardware describes {len(gpus)} x {gpus[0]}: run task=calibrate once, or give hardware=NAME"
    )
    raise ConfigError(message)


def machine_of_run(machine: HardwareConfig, world_size: int) -> HardwareConfig:
    """The part of a machine that a run uses: as many ranks as were started, on as few nodes as hold them."""
    if machine.device == "cpu":
        return replace(machine, num_gpus=world_size, num_nodes=1)
    return replace(machine, num_nodes=-(-world_size // machine.num_gpus))


def _describes(entry: HardwareConfig, driver_name: str) -> bool:
    """Whether it is the chip that the driver names, with its memory, on the board that has its full bandwidth."""
    chip, *others = entry.gpu.upper().split("-")
    words = set(re.split(r"[\s-]+", driver_name.upper()))
    sizes = {word for word in words if re.fullmatch(r"\d+GB", word)}
    is_slower = bool(words & _SLOWER_BOARDS - set(others))
    return entry.device == "cuda" and chip in words and sizes <= set(others) and not is_slower


def _gpu_names() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []


def host_memory_bytes() -> int:
    """All memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
