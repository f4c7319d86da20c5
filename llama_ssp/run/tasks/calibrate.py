"""`task=calibrate`: measures this machine and writes a file of the group `hardware`, which plans use.

A CPU is measured twice: rank 0 alone with all cores while the others wait, and all ranks together with their share of
the cores. A GPU behaves the same in both, so it gets bandwidth, FLOP/s, launches and links only. `calibration` holds
the measurements.

A shared machine is faster at one hour than at another. `task.refresh` measures whole pairs alone, in a third of the
time: the profiles keep their parts, and get new ratios to them.
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

from llama_ssp.errors import ConfigError, SspError, one_message
from llama_ssp.kernels.attention_by_length import capability_of
from llama_ssp.machines.hardware import build, problems_of
from llama_ssp.machines.machine import THIS_MACHINE, host_memory_bytes, system_bytes
from llama_ssp.machines.profile import SizePoint, text_of
from llama_ssp.ranks.failures import from_rank_0, raise_on_all_ranks
from llama_ssp.ranks.gpu import capture_stream
from llama_ssp.ranks.memory import anonymous_bytes
from llama_ssp.ranks.world import World
from llama_ssp.run.calibration import operators
from llama_ssp.run.calibration.profiles import Show, all_parts, composed, measure, rank_0_alone
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import Dtype, RunConfig
from llama_ssp.settings.tasks import CalibrateConfig
from llama_ssp.terminal.terminal import Terminal
from llama_ssp.words import counted

PROMPT_SHARE = 0.75
"""Share of the rate of a square matrix product that prompts reach, as published of an A100 (conf/hardware)."""


def run(config: RunConfig, world: World, terminal: Terminal) -> str | None:
    """Do `task=calibrate`; returns the closing message of rank 0."""
    task = config.task
    assert isinstance(task, CalibrateConfig)
    file = Path(task.output or catalogue.new_file("hardware", THIS_MACHINE))
    if not (task.output or task.refresh or world.comm.rank):
        with suppress(OSError):  # a check says why
            file.parent.mkdir(parents=True, exist_ok=True)
    do = refresh if task.refresh else calibrate
    with terminal.measuring() as show:
        return do(world, file, show)


def calibrate(world: World, file: Path, show: Show) -> str | None:
    """Measure, write the file on rank 0, and return the closing message there.

    Several ranks on one node measure the links between them. Raises SspError if the file cannot be written.
    """
    with raise_on_all_ranks(world.comm):
        if world.comm.rank == 0:
            _check_writable(file)
    context_bytes, is_gpu = _context_bytes(world.device), world.device.type == "cuda"
    reduces = operators.all_reduce_points(world.comm, world.device) if world.comm.size > 1 else []
    measured = [] if is_gpu else measure(world, partial(all_parts, reduces=reduces, show=show), show)
    figures: dict[str, Any] = {}
    with rank_0_alone(world) as is_alone:
        if is_alone:
            figures = _figures(world, reduces) | {"context_bytes": context_bytes}
            figures["collective_bytes"] = max(_context_bytes(world.device) - context_bytes, 0) if is_gpu else 0
    if world.comm.rank > 0:
        return None
    machine = build(figures | {"profiles": [asdict(each.parts) for each in measured]})
    figures["profiles"] = [asdict(composed(each, machine)) for each in measured]
    _write(file, figures)
    return f"wrote {file}"


def refresh(world: World, file: Path, show: Show) -> str | None:
    """Measure whole pairs again, write the file on rank 0, and return the closing message there.

    Raises SspError on every rank if the file has no profiles of these ranks, or cannot be written.
    """
    figures = from_rank_0(world.comm, lambda: _calibrated(file, world))
    machine = build(figures)
    profiles = {each.num_ranks: each for each in machine.profiles}
    measured = measure(world, lambda num_ranks, _name: profiles[num_ranks], show)
    if world.comm.rank > 0:
        return None
    again = {each.parts.num_ranks: composed(each, machine) for each in measured}
    changes = {number: each.forward_ratio / profiles[number].forward_ratio for number, each in again.items()}
    figures["profiles"] = [asdict(each) for each in (profiles | again).values()]
    figures["sources"] = figures.get("sources", {}) | {"profiles": f"whole forwards measured again on {date.today()}"}
    _write(file, figures)
    told = [f"{change:.2f} times as long on {counted(num_ranks, 'rank')}" for num_ranks, change in changes.items()]
    return f"wrote {file}: forwards now take {', '.join(told)}"


def _calibrated(file: Path, world: World) -> dict[str, Any]:
    """Read a file that has profiles of these ranks; raises SspError if there is none, or it cannot be written."""
    calibrate_first = "start task=calibrate without task.refresh"
    if world.device.type != "cpu":
        raise ConfigError(
            "task.refresh measures whole forwards of CPUs, which calibrated GPUs do not have: leave it out"
        )
    if not file.is_file():
        raise ConfigError(f"there is no calibration {file} to refresh: {calibrate_first}")
    figures = catalogue.read(file)
    if problems := problems_of(figures):
        raise ConfigError(f"{file}: {one_message(problems)}")
    has = {profile["num_ranks"] for profile in figures.get("profiles", [])}
    if missing := {1, world.comm.size} - has:
        known, ranks = ", ".join(map(str, sorted(has))), max(missing)
        raise ConfigError(f"{file} has profiles of these numbers of ranks: {known}; for {ranks}, {calibrate_first}")
    _check_writable(file)
    return figures


def _figures(world: World, reduces: list[SizePoint]) -> dict[str, Any]:
    device, is_gpu = world.device, world.device.type == "cuda"
    copy_bytes_per_s = operators.copy_bytes_per_s(device)
    dtypes = (Dtype.fp32, Dtype.bf16, Dtype.fp16) if is_gpu else (Dtype.fp32, Dtype.bf16)
    latency_s, bandwidth = 1e-4, 1e9
    if reduces:
        smallest, *_, largest = reduces
        latency_s, bandwidth = smallest.s, largest.size / max(largest.s - smallest.s, 1e-9)
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
        "flops_per_s": {each.name: operators.flops_per_s(getattr(torch, each.value), device) for each in dtypes},
        "flops_share": PROMPT_SHARE,
        "kernel_s": operators.kernel_s(device),
        "launch_s": operators.launch_s(device),
        "link": {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s},
        "sources": {
            "all": f"measured by task=calibrate on {platform.node()}, {date.today()}, torch {torch.__version__}",
            "link": "measured" if reduces else "assumed: one rank measures no links, start task=calibrate with several",
        },
    }


def _context_bytes(device: torch.device) -> int:
    """What a process has before its first model; on a GPU with the workspaces of products."""
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


def _rounded(figures: Any) -> Any:  # noqa: ANN401 - any tree of figures
    """Round to four digits, more than a measurement is good for."""
    if isinstance(figures, dict):
        return {key: _rounded(value) for key, value in figures.items() if value is not None}
    if isinstance(figures, list):
        return [_rounded(value) for value in figures]
    return float(f"{figures:.4g}") if isinstance(figures, float) else figures


def _check_writable(file: Path) -> None:
    """Raise SspError if the file cannot be written: before minutes of measuring."""
    where = file if file.exists() else file.parent
    if file.is_dir() or not os.access(where, os.W_OK):
        reason = "it is a folder" if file.is_dir() else f"no {where}" if not where.exists() else f"{where} is read-only"
        raise _unwritable(file, reason)


def _unwritable(file: Path, reason: str) -> SspError:
    return SspError(f"{file} cannot be written ({reason}): name another file with task.output=FILE")


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as lines."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _write(file: Path, figures: dict[str, Any]) -> None:
    figures = _rounded(figures)
    problems = problems_of(figures)
    assert not problems, f"calibrate writes what the planner reads: {problems}"
    figures["profiles"] = [
        {name: text_of(value) if isinstance(value, list) and value else value for name, value in each.items()}
        for each in figures["profiles"]
    ]
    text = yaml.dump(figures, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=160)
    try:
        file.write_text(f"# Written by task=calibrate; measured figures of this machine.\n{text}", encoding="utf-8")
    except OSError as error:
        raise _unwritable(file, str(error.strerror)) from error
