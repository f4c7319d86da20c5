"""Runs steps one after the other, each in a process of its own with a time limit, and packs what they leave.

    FOLDER/results.jsonl   a line per step, synced as soon as it ends; of several lines of one step the last one counts
    FOLDER/NAME.txt        what the step wrote to stdout and stderr
    FOLDER.tar.gz          all of it, written again after each step, so that a lost machine costs one step

A step's process gets only the ALLOWED variables, so that nothing it writes can hold another. On its stdout, lines that
are JSON objects are its figures; `fault` says what is wrong, `doing` what comes next, `skip` why it cannot run.

    PASS   exit code 0 and no fault        SKIP   it, or the machine, says why it cannot run
    FAIL   a fault, another code, a signal HANG   no end within its limit; all its processes are killed
"""

import json
import os
import re
import signal
import subprocess
import tarfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, HANG, SKIP = "PASS", "FAIL", "HANG", "SKIP"
SKIPPED = 77
"""Exit code of a step that cannot run."""
FOLDER, SHARES = "FIRST_HOUR_FOLDER", "FIRST_HOUR_RANKS_PER_GPU"
"""The variables that name the folder, for further files of a step, and the ranks of each GPU."""
_NAMES = """
    PATH HOME LANG LC_ALL TERM TMPDIR TZ VIRTUAL_ENV PYTHONPATH LD_LIBRARY_PATH LD_PRELOAD CC CXX XDG_CACHE_HOME
    CUDA_HOME CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING NVIDIA_VISIBLE_DEVICES
    HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF TORCHINDUCTOR_CACHE_DIR
    TORCHINDUCTOR_COMPILE_THREADS TRITON_CACHE_DIR TRITON_LIBCUDA_PATH OMP_NUM_THREADS MKL_NUM_THREADS HF_HUB_OFFLINE
    CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_NVLS_ENABLE
    FIRST_HOUR_RANKS_PER_GPU STUB_GPU_COUNT STUB_GPU_BYTES STUB_GPU_REPLAY_US STUB_GPU_ILLEGAL
"""
ALLOWED = frozenset(_NAMES.split())
"""The variables that steps get. Whatever may hold a secret, as an index of packages or a proxy may, is none of them."""
_MARK = "FIRST_HOUR_STEP"
_URL = re.compile(r"[a-z+]+://[^\s\"'<>]+")
_SIGNAL = re.compile(r"Signal \d+ \((SIG\w+)\) received")
"""What torchrun says of a rank."""
_ERROR = re.compile(r"[\w.]+(Error|Exception)\b")
_AFTERWARDS_S = 10.0
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process.

    Attributes:
        command: its command line.
        limit_s: how long it may take.
        num_gpus: how many it needs.
        modules: packages that it needs.
    """

    name: str
    command: Sequence[str]
    limit_s: float = 120.0
    num_gpus: int = 0
    modules: tuple[str, ...] = ()


def run(steps: Sequence[Step], folder: Path, *, num_gpus: int, minutes: float = 60.0) -> list[Row]:
    """Run steps in their order; returns their lines, each of which has name, result, reason, seconds and figures.

    Args:
        steps: whatever happens to one of them, the next one follows.
        folder: gets all files; lines of an earlier run stay.
        num_gpus: of this machine.
        minutes: no step begins later, and one that still runs then is stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends_at, rows = time.monotonic() + 60 * minutes, []
    for step in steps:
        print(f"{step.name}: ", end="", flush=True)
        left_s = ends_at - time.monotonic()
        reason = f"{minutes:g} minutes are over" if left_s <= 0 else _lacking(step, num_gpus)
        row: Row = {"name": step.name, "result": SKIP, "reason": reason, "s": 0.0, "figures": []}
        if reason is None:
            row |= _run(step, folder, min(step.limit_s, left_s))
        rows.append(row)
        with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        pack(folder)
        print(f"{row['result']}, {row['s']:.0f} s" + (f", {row['reason']}" if row["reason"] else ""), flush=True)
    return rows


def pack(folder: Path) -> Path:
    """Write FOLDER.tar.gz, without the names of users."""
    packed, part = (folder.with_name(folder.name + suffix) for suffix in (".tar.gz", ".part"))
    with tarfile.open(part, "w:gz") as archive:
        archive.add(folder, folder.name, filter=_nameless)
    part.replace(packed)
    return packed


def _nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uname = member.gname = ""
    return member


def allowed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that steps get."""
    return {name: value for name, value in environment.items() if name in ALLOWED}


def _lacking(step: Step, num_gpus: int) -> str | None:
    if step.num_gpus > num_gpus:
        return f"it needs {step.num_gpus} GPU{'s' * (step.num_gpus > 1)}, and {num_gpus or 'none'} can be used"
    absent = [name for name in step.modules if find_spec(name) is None]
    return f"{', '.join(absent)} cannot be imported" if absent else None


def _run(step: Step, folder: Path, limit_s: float) -> Row:
    mark, log = uuid.uuid4().hex, folder / f"{step.name}.txt"
    own = {_MARK: mark, FOLDER: str(folder), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=allowed(os.environ) | own,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _send(mark, signal.SIGABRT)  # each Python process then writes where it is
            with suppress(subprocess.TimeoutExpired):
                process.wait(_AFTERWARDS_S)
        finally:
            _send(mark, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may keep it for ever
                process.wait(_AFTERWARDS_S)
    took_s = time.monotonic() - started
    text = _URL.sub("URL", log.read_text(encoding="utf-8", errors="replace"))
    log.write_text(text, encoding="utf-8")
    figures = [row for line in text.splitlines() if line.startswith("{") and (row := _read(line))]
    result, reason = _judge(code, text, figures)
    if code is None:
        is_cut = limit_s < step.limit_s
        result = SKIP if is_cut else HANG
        reason = f"stopped after {limit_s:.0f} s{', because the minutes are over' * is_cut}{_last(figures)}"
    return {"result": result, "reason": reason, "s": round(took_s, 1), "figures": figures}


def _judge(code: int | None, text: str, figures: Sequence[Row]) -> tuple[str, str | None]:
    faults = [str(row["fault"]) for row in figures if "fault" in row]
    if code == SKIPPED:
        return SKIP, next((row["skip"] for row in figures if "skip" in row), "it says no reason")
    if faults:
        return FAIL, "; ".join(faults)
    if not code:
        return PASS, None
    signals = [signal.Signals(-code).name] if code < 0 else _SIGNAL.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("{")]
    said = [line for line in lines if _ERROR.match(line)] or lines or [""]
    return FAIL, (f"signal {signals[0]}" if signals else f"exit code {code}: {said[-1]}") + _last(figures)


def _last(figures: Sequence[Row]) -> str:
    doing = [str(row["doing"]) for row in figures if "doing" in row]
    return f", at: {doing[-1]}" if doing else ""


def _read(line: str) -> Row | None:
    with suppress(ValueError):
        row: Row = json.loads(line)
        return row
    return None


def _send(mark: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a step, also to those in sessions of their own and without a parent."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in file.read_bytes():
                os.kill(int(file.parent.name), number)
