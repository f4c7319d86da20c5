"""`task=calibrate`: measures this machine and writes a file of the group `hardware`, which plans use.

A CPU is measured twice: rank 0 alone with all cores while the others wait, and all ranks together with their share of
the cores. Whole pairs decode in turns between the other parts, since a shared machine changes meanwhile. A GPU behaves
the same in both, so it gets bandwidth, FLOP/s, launches and links only. `calibration` holds the measurements.
"""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from llama_ssp.calibration import model_pairs, operators, rounds
from llama_ssp.calibration.model_pairs import Pairs, PairTime
from llama_ssp.config.hardware import Profile, SizePoint, build, problems_of
from llama_ssp.config.machine import THIS_MACHINE, host_memory_bytes, system_bytes
from llama_ssp.config.options import folders
from llama_ssp.config.schema import Dtype, RunConfig
from llama_ssp.config.tasks.calibrate import CalibrateConfig
from llama_ssp.distributed.agree import raise_on_all_ranks
from llama_ssp.distributed.comms import Comm
from llama_ssp.distributed.memory import anonymous_bytes
from llama_ssp.distributed.world import World, on_all_cores
from llama_ssp.errors import SspError
from llama_ssp.models.linear import can_halve
from llama_ssp.models.native.linear import COMPILED, product_of

DTYPES = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16}
LARGEST_MESSAGE, SMALLEST_MESSAGE = -1, 0


class _Measured(NamedTuple):
    """A profile without its composition, and the pairs that ranks held together, and apart."""

    profile: Profile
    together: list[PairTime]
    apart: list[PairTime]


def run(config: RunConfig, world: World) -> str | None:
    """Do `task=calibrate`; returns the closing message of rank 0."""
    assert isinstance(config.task, CalibrateConfig)
    file = calibrate(world, output=config.task.output)
    return f"wrote {file}" if file else None


def calibrate(world: World, *, output: str | None = None) -> Path | None:
    """Measure, write the file on rank 0, and return its path there; raises SspError if it cannot be written.

    Several ranks on one node measure the links between them. `output` None is the catalogue's entry `this_machine`.
    """
    file = Path(output) if output else folders.new_file("hardware", THIS_MACHINE)
    with raise_on_all_ranks(world.comm):
        if world.comm.rank == 0:
            if output is None:
                with suppress(OSError):  # the check says why
                    file.parent.mkdir(parents=True, exist_ok=True)
            _check_writable(file)
    context_bytes = _context_bytes(world.device)
    reduces = rounds.all_reduce_points(world.comm, world.device) if world.comm.size > 1 else []
    is_gpu = world.device.type == "cuda"
    measured = [] if is_gpu else _profiles(world, reduces)
    if world.comm.rank > 0:
        world.comm.barrier()
        return None
    with _all_cores(world):
        figures = _figures(world, reduces) | {"context_bytes": context_bytes}
        figures["collective_bytes"] = max(_context_bytes(world.device) - context_bytes, 0) if is_gpu else 0
    world.comm.barrier()
    figures["profiles"] = [asdict(profile) for profile in _composed(figures, measured)]
    _write(file, _rounded(figures))
    return file


def _profiles(world: World, reduces: list[SizePoint]) -> list[_Measured]:
    """Measure rank 0 alone with all cores, then all ranks together: operators, and whole pairs, also one for each."""
    measured: list[_Measured] = []
    if world.comm.rank == 0:
        with _all_cores(world):
            pairs = Pairs(Comm.single())
            profile = _profile(num_ranks=1, reduces=[], turn=pairs.turn)
            measured.append(_Measured(profile, pairs.times(), []))
            del pairs  # frees them before the next ones are loaded
    world.comm.barrier()
    if world.comm.size > 1:
        together, apart = Pairs(world.comm), Pairs(world.comm, apart=True)

        def turn() -> None:
            together.turn()
            apart.turn()

        profile = _profile(num_ranks=world.comm.size, reduces=reduces, turn=turn)
        measured.append(_Measured(profile, together.times(), apart.times()))
        world.comm.barrier()
    return measured


def _composed(figures: dict[str, Any], measured: list[_Measured]) -> list[Profile]:
    machine = build(figures | {"profiles": [asdict(profile) for profile, *_ in measured]})
    return [model_pairs.composed(profile, machine, together, apart) for profile, together, apart in measured]


def _profile(*, num_ranks: int, reduces: list[SizePoint], turn: Callable[[], None]) -> Profile:
    """Measure everything except whole pairs, which have their `turn` in between, so that all see the same machine."""
    sets = (*operators.WORKING_SETS, operators.beyond_caches())
    linear = operators.linear_points(torch.float32, Dtype.fp32.name, working_sets=sets)
    turn()
    halves = []
    if can_halve():
        halves = operators.linear_points(torch.float32, Dtype.fp16.name, working_sets=sets, from_16_bits=True)
    turn()
    elements, rows = operators.FEW_ELEMENTS, operators.FEW_ROWS
    for name, kind in COMPILED.items():
        if product_of(kind):
            halves += operators.linear_points(
                torch.float32, name, working_sets=sets, quantization=name, all_elements=elements, all_rows=rows
            )
        turn()
    for dtype in (Dtype.bf16, Dtype.fp16):  # few points, since runs use 16-bit arithmetic only on request
        halves += operators.linear_points(
            DTYPES[dtype], dtype.name, working_sets=operators.WORKING_SETS[1:], all_elements=elements, all_rows=rows
        )
    turn()
    layer, frame = operators.operator_points(linear, rounds.some_draw())
    turn()
    attention = operators.attention_points()
    turn()
    draw, verify = rounds.rule_points(operators.some_forward())
    profile = Profile(
        num_ranks=num_ranks,
        linear=linear + halves,
        tied_head=operators.linear_points(
            torch.float32, Dtype.fp32.name, working_sets=operators.WORKING_SETS[:1], keeps_weight=True
        ),
        layer=layer,
        frame=frame,
        attention=attention,
        draw=draw,
        verify=verify,
        all_reduce=reduces,
        round_s=rounds.round_s(),
    )
    turn()
    return profile


@contextmanager
def _all_cores(world: World) -> Iterator[None]:
    """Give rank 0 the cores and threads of a run of one rank."""
    if world.device.type != "cpu" or world.comm.size == 1:
        yield
        return
    threads = torch.get_num_threads()
    try:
        with on_all_cores(world.cores):
            torch.set_num_threads(len(world.cores))
            yield
    finally:
        torch.set_num_threads(threads)


def _figures(world: World, reduces: list[SizePoint]) -> dict[str, Any]:
    device, is_gpu = world.device, world.device.type == "cuda"
    copy_bytes_per_s = operators.copy_bytes_per_s(device)
    dtypes = DTYPES if is_gpu else {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
    latency_s = reduces[SMALLEST_MESSAGE].s if reduces else 1e-4
    bandwidth = reduces[LARGEST_MESSAGE].size / max(reduces[LARGEST_MESSAGE].s - latency_s, 1e-9) if reduces else 1e9
    return {
        "name": THIS_MACHINE,
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if is_gpu else f"{os.cpu_count()} cores of {platform.machine()}",
        "num_gpus": world.ranks.local_size,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_gpu else host_memory_bytes(),
        "system_bytes": 0 if is_gpu else system_bytes(host_memory_bytes()),
        "bandwidth_bytes_per_s": copy_bytes_per_s,
        "copy_bytes_per_s": copy_bytes_per_s,
        "flops_per_s": {dtype.name: operators.flops_per_s(kind, device) for dtype, kind in dtypes.items()},
        "kernel_s": operators.operator_s(device, captured=True),
        "launch_s": operators.operator_s(device, captured=False),
        "link": {"bandwidth_bytes_per_s": bandwidth, "latency_s": latency_s},
        "sources": {
            "all": f"measured by task=calibrate on {platform.node()}, {date.today()}, torch {torch.__version__}",
            "link": "measured" if reduces else "assumed: one rank measures no links, start task=calibrate with several",
        },
    }


def _context_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return anonymous_bytes() or 0
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


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


def _write(file: Path, figures: dict[str, Any]) -> None:
    problems = problems_of(figures)
    assert not problems, f"calibrate writes what the planner reads: {problems}"
    text = yaml.safe_dump(figures, sort_keys=False, default_flow_style=None, width=160)
    try:
        file.write_text(f"# Written by task=calibrate; measured figures of this machine.\n{text}", encoding="utf-8")
    except OSError as error:
        raise _unwritable(file, str(error.strerror)) from error
