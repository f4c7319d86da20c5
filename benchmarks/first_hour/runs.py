"""Whole runs of `launch/run.py` on one GPU and several: `python -m benchmarks.first_hour.runs NAME`.

speed-...    synthetic models of true sizes on one GPU, plain and speculative; what does not fit says so
text-...-of-N   in fp32 N GPUs give the text of one: in a placement, with a kind of draft, with other weights
sampled      in fp16 two GPUs sample the same text twice
NAME of PLACED, on all GPUs: a large pair in a placement
exit-codes   those that docs/reference/runs.md promises
rank-...     one of two ranks is killed or stopped: the other one ends in time, with a sentence
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_hour.runner import ROOT, SHARES
from benchmarks.first_hour.shared_gpu import program
from benchmarks.first_hour.step import Check, Where, main, say, skip
from llama_ssp.errors import CapacityError, ConfigError
from tests.helpers.disturbed import lines
from tests.helpers.gpu_faults import AT_MOST_S, CELLS, FULL, KILLED, Cell, arguments, check_sentence, steps
from tests.helpers.models import build_checkpoint

APART = ["placement=own_gpu"]
OVERLAPPED = [*APART, "speculation.overlap=true"]
PLACED = {"sharded": ["placement=sharded"], "own-gpu": APART, "overlapped": OVERLAPPED}
SHIPPED = ROOT / "llama_ssp" / "shipped"
SHARDED = PLACED["sharded"]
TEXTS = {
    "sharded": SHARDED,
    "python": [*SHARDED, "cuda_graphs=false"],
    "own-gpu": APART,
    "overlapped": OVERLAPPED,
    "own-sums": [*SHARDED, "own_sums=true"],
    "replicated": ["placement=replicated"],
    "tree": [*SHARDED, "speculation.tree=2x2x1"],
    "head": [*SHARDED, "draft=tiny-eagle"],
    "ngram": [*SHARDED, "draft=ngram"],
    "int8": [*SHARDED, "model.quantization=int8_weight_only"],
    "stages": ["placement.target.stages=2"],
    "stages-head": ["placement.target.stages=2", "draft=tiny-eagle"],
    "stages-groups": ["placement.target.stages=2", "placement.target.groups=2", "batch_size=4", "num_samples=4"],
    "experts": [*SHARDED, "draft=ngram", "model=local", "cuda_graphs=false"],  # torch's product of groups in fp32 waits
}
FOUR_STAGES = {"4-stages": ["placement.target.stages=4"]}
SIZES = {
    "7B": "tinyllama_1B",
    "7B_8bit": "tinyllama_1B",
    "13B": "7B",
    "30B_8bit": "7B",
    "30B": "tinyllama_1B",
    "65B_8bit": "tinyllama_1B",
    "13B_8bit": "tinyllama_1B",
    "65B": "tinyllama_1B",
}
"""Targets, the most telling first, and drafts that fit beside them on 80 GB; the last one needs more."""
LIMIT_S = 240
LOST = [cell for cell in CELLS if cell.fault != FULL and cell.cuda_graphs]


def ended(where: Where, settings: Sequence[str], *, num_ranks: int = 1) -> tuple[int, Path]:
    """Run to the end; returns the exit code and the run folder. A fallback that the run warns of is a fault."""
    folder = Path(tempfile.mkdtemp())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    common = [f"device={where.device.type}", "prompt=import os", f"run_dir={folder / 'run'}"]
    several = [*torchrun, *program()] if num_ranks > 1 else []
    command = [sys.executable, *several, "launch/run.py", *common, *settings]
    say(doing=" ".join([*settings, f"on {num_ranks}"]))
    found = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False
    )
    print(found.stdout)
    for line in found.stdout.splitlines():
        if "continuing" in line:
            say(fault=line.strip())
    return found.returncode, folder / "run"


def texts(where: Where, *, name: str, num_ranks: int) -> Iterator[str]:
    """Hold the text of one of TEXTS to that of one GPU without a draft, greedily and in fp32."""
    common = ["task=generate", "max_new_tokens=32", "ignore_eos=true", "sampling.temperature=0", "model.dtype=fp32"]
    settings, folder = (TEXTS | FOUR_STAGES)[name], Path(tempfile.mkdtemp())
    if "model=local" in settings:
        shutil.copytree(SHIPPED / "tiny", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        build_checkpoint(folder, "mixtral", vocab_size=vocab_size, num_key_value_heads=4)
        common += [f"model.path={folder}"]
    own = [setting for setting in settings if setting.startswith(("model", "cuda_graphs", "batch", "num_samples"))]
    drafted = [] if "draft=ngram" in settings else ["draft.model.dtype=fp32"]
    found = []
    for number, more in ((1, [*own, "draft=none"]), (num_ranks, [*settings, *drafted])):
        code, run = ended(where, [*common, *more], num_ranks=number)
        if code:
            yield f"exit code {code} on {number}"
            return
        found.append([line["token_ids"] for line in lines(run)])
    if found[0] != found[1]:
        yield "another text than that of one GPU"


def sampled(where: Where) -> Iterator[str]:
    """Sample in 16 bits with the draft on a GPU of its own, so that probabilities travel between ranks."""
    dtypes = ["model.dtype=fp16", "draft.model.dtype=fp16"] if where.is_gpu else []
    runs = [ended(where, ["task=generate", "max_new_tokens=32", *APART, *dtypes], num_ranks=2)[1] for _ in (1, 2)]
    found = [[line["token_ids"] for line in lines(run)] for run in runs]
    if found[0] != found[1]:
        yield "two runs sampled different texts"


def compared(where: Where, *, settings: Sequence[str], target: str, draft: str, num_ranks: int = 1) -> Iterator[str]:
    """Compare plain and speculative sampling; their times, forecasts, and memory against the plan."""
    pair = ["model=tiny", "draft=tiny-draft"] if where.is_small else [f"model={target}", f"draft={draft}"]
    dtypes = ["model.dtype=fp16", "draft.model.dtype=fp16"] if where.is_gpu else []
    if num_ranks > 1 and where.is_gpu:
        num_ranks = torch.cuda.device_count() * int(os.environ.get(SHARES, "1"))
        if program():  # the memory of one GPU is that of all
            pair = ["model=7B", "draft=tinyllama_1B"]
    sizes = ["task=compare", "weights=synthetic", "ignore_eos=true", "max_new_tokens=128"]
    code, run = ended(where, [*sizes, *pair, *dtypes, *settings], num_ranks=num_ranks)
    status = (run / "status").read_text() if (run / "status").exists() else ""
    if status.startswith(f"{CapacityError.exit_code}:"):
        skip(status.strip())
    if code:
        yield f"exit code {code}: {status.strip()}"
        return
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    wanted = ("plain", "speculative", "speedup", "forecast", "memory", "overlap", "placement", "world_size")
    say(**{key: summary.get(key) for key in wanted})
    for rank in summary["memory"] if where.is_gpu and not program() else ():  # ranks that share a GPU see all of it
        if rank["measured_peak_bytes"] > rank["planned_bytes"]:
            yield f"rank {rank['rank']} used {rank['measured_peak_bytes']} bytes, {rank['planned_bytes']} planned"


def exit_codes(where: Where) -> Iterator[str]:
    """A run that ends well, one with a mistake, and one that does not fit."""
    short, large = ["task=generate", "max_new_tokens=8"], ["model=65B", "draft=none", "weights=synthetic"]
    for wanted, settings in (
        (0, short),
        (ConfigError.exit_code, [*short, "speculation.num_draft_tokens=0"]),
        (CapacityError.exit_code, [*short, *large, "model.dtype=fp32", "batch_size=512", "num_samples=512"]),
    ):
        code, _ = ended(where, settings)
        if code != wanted:
            yield f"{' '.join(settings)}: exit code {code}, expected {wanted}"


def lost(where: Where, *, cell: Cell) -> Iterator[str]:  # noqa: ARG001 - two GPUs
    """Kill or stop one of two ranks; `check_sentence` raises if the other one ends otherwise than promised."""
    folder, ranks = Path(tempfile.mkdtemp()), []
    outputs = [folder / f"{rank}.txt" for rank in (0, 1)]
    for output, step in zip(outputs, steps(), strict=True):
        with output.open("w") as sink:
            command = [sys.executable, *program(), *arguments(cell, folder)]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | step, stdout=sink, stderr=sink))
    while len(lines(folder / "run")) <= 1:
        if any(each.poll() is not None for each in ranks):
            yield f"a rank ended before the fault: {' '.join(output.read_text()[-500:] for output in outputs)}"
            return
        time.sleep(0.01)
    started = time.monotonic()
    ranks[cell.rank].send_signal(signal.SIGKILL if cell.fault == KILLED else signal.SIGSTOP)
    code = ranks[1 - cell.rank].wait(AT_MOST_S[cell.fault])
    say(ended_after_s=time.monotonic() - started)
    if code != 1:
        yield f"the other rank ended with code {code}, expected 1"
    check_sentence(cell, folder / "run", [line for file in outputs for line in file.read_text().splitlines()])


CHECKS: dict[str, tuple[int, Check]] = {
    f"speed-{target}": (0, partial(compared, settings=[], target=target, draft=draft))
    for target, draft in SIZES.items()
}
CHECKS |= {"exit-codes": (0, exit_codes)}
CHECKS |= {
    f"text-{name}-of-{number}": (number, partial(texts, name=name, num_ranks=number))
    for number in (2, 3, 4)
    for name in TEXTS
    if number % (2 if name.startswith("stages") else 1) == 0
}
CHECKS |= {"text-4-stages-of-4": (4, partial(texts, name="4-stages", num_ranks=4))}
CHECKS |= {"sampled": (2, sampled)}
CHECKS |= {
    name: (2, partial(compared, settings=settings, target="30B", draft="7B", num_ranks=2))
    for name, settings in PLACED.items()
}
CHECKS |= {
    f"rank-{cell.fault}-{cell.task}{'-overlapped' * cell.overlaps}": (2, partial(lost, cell=cell)) for cell in LOST
}
"""The GPUs that each needs, and what it does; lost ranks come last."""

if __name__ == "__main__":
    main({name: check for name, (_, check) in CHECKS.items()})
