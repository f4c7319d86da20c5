"""`task=calibrate`: measures this machine and writes a file of the group `hardware`, which plans use.

`measures` and `run.calibration` hold the measurements. All ranks measure at the same time, so that a CPU's figures hold
for a rank with its share of cores and memory; rank 0 writes its own figures. Several ranks on one node also measure
sums over these ranks, by NCCL and by the program's kernel; ranks on several nodes measure a sum between nodes.
"""

import os
import platform
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from llama_ssp import catalogue
from llama_ssp.catalogue import Dtype
from llama_ssp.errors import SspError
from llama_ssp.extensions.calibrate import measures
from llama_ssp.extensions.calibrate.records import CalibrateConfig
from llama_ssp.kernels.attention_by_length import capability_of
from llama_ssp.machines.hardware import MEASURED, Link, MeasuredSum, problems_of
from llama_ssp.machines.machine import THIS_MACHINE, gpu_links, host_memory_bytes, system_bytes
from llama_ssp.ranks.failures import raise_on_all_ranks
from llama_ssp.ranks.gpu import capture_stream
from llama_ssp.ranks.memory import anonymous_bytes
from llama_ssp.ranks.world import World
from llama_ssp.run import calibration
from llama_ssp.settings.schema import RunConfig
from llama_ssp.terminal.terminal import ShowProgress, Terminal
from llama_ssp.types import Parsed

_SUMS = "this machine"
PROMPT_SHARE = 0.75
"""Share of the rate of a square matrix product that prompts reach, as published for an A100 (conf/hardware)."""


def run(config: RunConfig, world: World, terminal: Terminal) -> str | None:
    """Do `task=calibrate`; returns the closing message of rank 0."""
    task = config.task
    assert isinstance(task, CalibrateConfig)
    file = Path(task.output or catalogue.new_file("hardware", THIS_MACHINE))
    if not (task.output or world.comm.rank):
        with suppress(OSError):  # a check says why
            file.parent.mkdir(parents=True, exist_ok=True)
    with terminal.measuring() as show:
        return calibrate(world, file, show)


def calibrate(world: World, file: Path, show: ShowProgress) -> str | None:
    """Measure, write the file on rank 0, and return the closing message there.

    Raises SspError if the file cannot be written.
    """
    with raise_on_all_ranks(world.comm):
        if world.comm.rank == 0:
            _check_writable(file)
    context_bytes, is_gpu = _context_bytes(world.device), world.device.type == "cuda"
    show(_SUMS, 0, 2)
    num_local = world.ranks.local_size
    measured = partial(measures.sums, world.comm, world.device, num_local=num_local)
    sums, own_sums = measured(), measured(is_own=True) if is_gpu else []
    network = measures.network(world.comm, world.device, num_local=num_local)
    show(_SUMS, 1, 2)
    figures = _figures(world, sums, network) | {"context_bytes": context_bytes}
    figures["own_sums"] = [asdict(found) for found in own_sums]
    figures["collective_bytes"] = max(_context_bytes(world.device) - context_bytes, 0) if is_gpu else 0
    show(_SUMS, 2, 2)
    world.comm.barrier()
    if world.comm.rank > 0:
        return None
    _write(file, figures)
    return f"wrote {file}"


def _figures(world: World, sums: list[MeasuredSum], network: Link | None) -> dict[str, Any]:
    device, is_gpu = world.device, world.device.type == "cuda"
    copy_bytes_per_s = calibration.copy_bytes_per_s(device)
    dtypes = (Dtype.fp32, Dtype.bf16, Dtype.fp16) if is_gpu else (Dtype.fp32, Dtype.bf16)
    latency_s, bandwidth = 1e-4, 1e9
    if sums:
        smallest, *_, largest = (found for found in sums if found.num_ranks == world.ranks.local_size)
        latency_s, bandwidth = smallest.s, largest.num_bytes / max(largest.s - smallest.s, 1e-9)
    return {
        "name": THIS_MACHINE,
        "device": device.type,
        "capability": capability_of(device) if is_gpu else None,
        "gpu": torch.cuda.get_device_name(device) if is_gpu else f"{os.cpu_count()} cores of {platform.machine()}",
        "num_gpus": world.ranks.local_size,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_gpu else host_memory_bytes(),
        "system_bytes": 0 if is_gpu else system_bytes(host_memory_bytes()),
        "bandwidth_bytes_per_s": copy_bytes_per_s,
        "copy_bytes_per_s": copy_bytes_per_s,
        "flops_per_s": {dtype.name: measures.flops_per_s(getattr(torch, dtype.value), device) for dtype in dtypes},
        "flops_share": PROMPT_SHARE,
        "products": {} if is_gpu else {name: asdict(speed) for name, speed in calibration.cpu_speeds().items()},
        "kernel_s": measures.kernel_s(device),
        "launch_s": measures.launch_s(device),
        "link": {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s},
        "network": network and asdict(network),
        "sums": [asdict(found) for found in sums],
        "sources": {
            "all": f"measured by task=calibrate on {platform.node()}, {date.today()}, torch {torch.__version__}",
            "link": f"measured: {gpu_links() if is_gpu else 'shared memory'}"
            if sums
            else "assumed: one rank measures no links, start task=calibrate with several",
            "network": MEASURED if network else "not measured: start task=calibrate on two nodes",
        },
    }


def _context_bytes(device: torch.device) -> int:
    """Return the memory of a process before its first model; on a GPU with the workspaces of products."""
    if device.type == "cpu":
        return anonymous_bytes() or 0
    x = torch.zeros(64, 64, dtype=torch.float16, device=device)
    for stream in (torch.cuda.current_stream(device), capture_stream()):
        with torch.cuda.stream(stream):
            x @ x  # makes the stream's workspace, which stays
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _rounded(figures: Parsed) -> Parsed:
    """Round to four digits, which is more precise than measurements are."""
    if isinstance(figures, dict):
        return {key: _rounded(value) for key, value in figures.items() if value is not None}
    if isinstance(figures, list):
        return [_rounded(value) for value in figures]
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


def _check_writable(file: Path) -> None:
    """Raise SspError if the file cannot be written, before minutes of measuring are lost."""
    where = file if file.exists() else file.parent
    if file.is_dir() or not os.access(where, os.W_OK):
        reason = "it is a folder" if file.is_dir() else f"no {where}" if not where.exists() else f"{where} is read-only"
        raise _unwritable(file, reason)


def _unwritable(file: Path, reason: str) -> SspError:
    return SspError(f"{file} cannot be written ({reason}): name another file with task.output=FILE")


def _write(file: Path, figures: dict[str, Any]) -> None:
    figures = _rounded(figures)
    problems = problems_of(figures)
    assert not problems, f"calibrate writes what the planner reads: {problems}"
    text = yaml.safe_dump(figures, sort_keys=False, default_flow_style=None, width=160)
    try:
        file.write_text(f"# Written by task=calibrate; measured figures of this machine.\n{text}", encoding="utf-8")
    except OSError as error:
        raise _unwritable(file, str(error.strerror)) from error
