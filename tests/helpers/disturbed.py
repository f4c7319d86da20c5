"""Runs that are disturbed in a known phase, and what must hold when they have ended.

Phases are met without help of the program: the log of a rank says that it loads, and recorded completions say that it
has gone on to decode, which is nearly all prefill with long prompts and two new tokens.
"""

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.commands import run

PHASES = ("loading", "prefill", "decoding")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP)
NUM_SAMPLES = 24
LIMIT_S = 5


class Cell(NamedTuple):
    """Which signal meets which rank in which phase."""

    number: signal.Signals
    rank: int
    phase: str

    def __str__(self) -> str:
        return f"{self.number.name} of rank {self.rank} while {self.phase}"


CELLS = [Cell(*cell) for cell in product(SIGNALS, (0, 1), PHASES)]


def settings(cell: Cell, run_dir: Path) -> list[str]:
    """Of a run that is long enough to be met in the phase."""
    amounts = {"prefill": ("import os\n" * 200, 2), "loading": ("import os", 8), "decoding": ("def f(x):", 96)}
    prompt, max_new_tokens = amounts[cell.phase]
    return [
        "task=generate",
        "task.format=jsonl",
        "device=cpu",
        f"run_dir={run_dir}",
        f"num_samples={NUM_SAMPLES}",
        f"prompt={prompt}",
        f"max_new_tokens={max_new_tokens}",
        "ignore_eos=true",
        f"timeouts.load_s={LIMIT_S if cell.phase == 'loading' else 60}",
        f"timeouts.decode_s={LIMIT_S}",
    ]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The completions on record, without a last line that is not whole."""
    file = run_dir / "run.jsonl"
    text = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def wait_for(condition: Callable[[], object], *, at_most_s: float = 30) -> None:
    deadline = time.monotonic() + at_most_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def pid_of_rank(run_dir: Path, rank: int) -> int:
    """The process of a rank, which has begun to load, perhaps after other starts."""
    log = (run_dir / "ranks" / f"{rank:03d}.log").read_text()
    return int(re.findall(rf"rank {rank} of .*, process (\d+)", log)[-1])


def has_begun(cell: Cell, run_dir: Path, *, num_ranks: int = 2) -> bool:
    """Whether the phase has begun on the rank that is to be disturbed, and on the other one if there is one."""
    if cell.phase != "loading":
        return len(lines(run_dir)) > 1
    logs = [run_dir / "ranks" / f"{rank:03d}.log" for rank in range(num_ranks)]
    return all(log.exists() and "process " in log.read_text() for log in logs)


def is_alive(pid: int) -> bool:
    """Whether a process still runs; one that has ended and that nobody has asked for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def check_end(cell: Cell, run_dir: Path, errors: Sequence[str]) -> None:
    """Assert what must hold once the job has ended: one sentence, and the same in the status."""
    status = (run_dir / "status").read_text()
    said = [line for text in errors for line in text.splitlines()]
    if cell.number in {signal.SIGTERM, signal.SIGHUP}:
        assert status == "interrupted\n", errors
        assert len([line for line in said if line.startswith("interrupted")]) == 1, errors
        return
    doing = "loading" if cell.phase == "loading" else "decoding"
    sentence = f"rank {cell.rank} is missing while {doing} ("
    assert status.startswith(f"1: {sentence}"), (status, errors)
    assert len([line for line in said if line.startswith(sentence)]) == 1, errors
    assert len([line for line in said if "missing while" in line]) == 1, errors


def check_resumption(
    cell: Cell, run_dir: Path, before: list[dict[str, Any]], *, more: Sequence[str] = (), num_ranks: int = 1
) -> None:
    """Assert that the same command completes the run, on one rank or so many, and redoes nothing."""
    done = run([*settings(cell, run_dir), *more], num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    after = lines(run_dir)
    assert all(line in after for line in before)
    assert [(line["index"], line["mode"], line["sample"]) for line in after] == [
        (0, "speculative", sample) for sample in range(NUM_SAMPLES)
    ]
    assert (run_dir / "status").read_text() == "done\n"
