"""How a run starts: on ranks that exist already, in this process alone, or on ranks of its own.

`ranks=N` is a word of `llama-ssp run`, no setting: it changes no text, and a config has no such key. Imports no torch.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llama_ssp.distributed.environment import read_ranks
from llama_ssp.errors import ConfigError

KEY = "ranks"
NODES = "several nodes are started by sbatch launch/slurm.sbatch, or by torchrun --nnodes with launch/run.py"
MOST_PER_CORE = 8
_DEVICES = Path("/dev")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# Each keeps the ranks of this machine in one process, which takes the GPUs itself or needs none.
_ON_ONE_RANK = {"placement=accelerate", "placement.target.kind=accelerate", "device=cpu"}


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the words of a command line say of ranks.

    Attributes:
        words: the others.
        num_ranks: how many to start; None if this process is a rank that torchrun or srun has started.
        sentence: the first line of the run; None where nothing new needs to be said.
    """

    words: list[str]
    num_ranks: int | None
    sentence: str | None = None


def read_start(words: Sequence[str], environ: Mapping[str, str], *, default: int | None) -> Start:
    """Read and take out `ranks=`.

    Args:
        words: the command line.
        environ: says whether ranks exist already.
        default: ranks where the words do not say; None starts one for each GPU, else one.

    Raises:
        ConfigError: no number that can be started here, or another one than there are already.
    """
    given = [word.partition("=")[2] for word in words if word.startswith(f"{KEY}=")]
    others = [word for word in words if not word.startswith(f"{KEY}=")]
    wanted = _number(given) if given else None
    if launcher := launcher_of(environ):
        size = read_ranks(environ).size
        if wanted not in {None, size}:
            raise ConfigError(f"{KEY}={wanted}: {launcher} has started {size} already, so leave {KEY}= out")
        return Start(words=others, num_ranks=None)
    if any(word.startswith("hydra/launcher=") for word in others):
        if given:
            raise ConfigError(
                f"{KEY}={wanted} has no effect on jobs: hydra.launcher.ranks_per_node={wanted} sets theirs"
            )
        return Start(words=others, num_ranks=1)
    if wanted is not None:
        return Start(words=others, num_ranks=wanted, sentence=f"starting {_counted(wanted)}…")
    if default is not None:
        return Start(words=others, num_ranks=default)
    if _ON_ONE_RANK & set(others):
        return Start(words=others, num_ranks=1, sentence=f"starting 1 rank ({KEY}=N starts more)…")
    gpus = num_gpus(environ)
    why = "one for each GPU" if gpus else "since no GPU was found"
    sentence = f"starting {_counted(max(gpus, 1))}, {why} ({KEY}=N starts another number)…"
    return Start(words=others, num_ranks=max(gpus, 1), sentence=sentence)


def _counted(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _number(given: Sequence[str]) -> int:
    """Return the only value as a number of ranks."""
    shown = f"{KEY}={given[0]}"
    if len(given) > 1:
        raise ConfigError(f"{' '.join(f'{KEY}={value}' for value in given)}: give {KEY}= once")
    if not re.fullmatch(r"[1-9]\d*", given[0]):
        raise ConfigError(
            f"{shown} must be one whole number from 1 on, of the processes on this machine, such as {KEY}=2; {NODES}"
        )
    most = max(MOST_PER_CORE * (os.cpu_count() or 1), num_gpus(os.environ))
    if int(given[0]) > most:
        raise ConfigError(f"{shown} must be at most {most} on this machine, which has {os.cpu_count()} cores; {NODES}")
    return int(given[0])


def launcher_of(environ: Mapping[str, str]) -> str | None:
    """Name what started this process as a rank; None if nothing did. A shell in a step of one task is no rank."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "torchrun"
    return "srun" if read_ranks(environ).size > 1 else None


def num_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that torch would see, without torch: those of the environment, else of the device files."""
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        pass  # a torch without metadata
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            named = [each.strip() for each in environ[name].split(",")]
            return named.index("-1") if "-1" in named else len([each for each in named if each])
    nvidia = [file for file in _DEVICES.glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()]
    return len(nvidia) or sum(_is_gpu(node / "properties") for node in _AMD_NODES.glob("*"))


def _is_gpu(properties: Path) -> bool:
    """Whether a node of AMD's driver has vector units, which its CPUs have not."""
    try:
        return re.search(r"^simd_count [1-9]", properties.read_text(encoding="ascii"), re.MULTILINE) is not None
    except OSError:
        return False
