"""`llama-ssp run`: as a rank that exists already, in this process alone, or on ranks that it starts itself.

`ranks=N` is a word of `llama-ssp run`, no setting: it changes no text, and a config has no such key. All mistakes of
the command line, and models that the engine does not run, are found before a rank is started: in one sentence, with the
true exit code, without torch.
"""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llama_ssp.errors import ConfigError
from llama_ssp.ranks.environment import Ranks, launcher_of, read_ranks
from llama_ssp.ranks.signals import STOP_SIGNALS
from llama_ssp.run.commands import run
from llama_ssp.run.commands.ranks.relay import SignalRelay
from llama_ssp.run.startup import StartClock
from llama_ssp.run.tasks.dry_run import check_models
from llama_ssp.settings.schema import RunConfig
from llama_ssp.terminal.unread import complain

KEY = "ranks"
NODES = "several nodes are started by sbatch launch/slurm.sbatch, or by torchrun --nnodes with launch/run.py"
MOST_PER_CORE = 8
_DEVICES = Path("/dev")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# Each keeps the ranks of this machine in one process, which takes the GPUs itself or needs none.
_ON_ONE_RANK = {"placement=accelerate", "placement.target.kind=accelerate", "device=cpu"}


@dataclass(frozen=True, kw_only=True)
class Start:
    """The ranks that a command line asks for.

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


def main(words: Sequence[str], *, num_ranks: int | None) -> int:
    """Run the command line; returns the exit code.

    Args:
        words: settings, options, and perhaps `ranks=`.
        num_ranks: how many ranks without that word; None means one for each GPU, else one.
    """
    try:
        start = read_start(words, os.environ, default=num_ranks)
    except ConfigError as error:
        return run.fail(str(error), error.exit_code, read_ranks(os.environ))
    if start.num_ranks is None:
        return run.main(start.words)
    if start.num_ranks > 1:
        return _start_ranks(start, start.num_ranks)
    sentences = [start.sentence] if start.sentence else []

    def announce_and_do(config: RunConfig, clock: StartClock) -> bool:
        check_models(config)
        if sentences:
            complain(sentences.pop())
        return run.task_code()(config, clock)

    return run.main(start.words, act=announce_and_do)


def _start_ranks(start: Start, num_ranks: int) -> int:
    """Check and plan as rank 0 would; then start the ranks, each with the command line of this process."""
    points: list[RunConfig] = []

    def note(config: RunConfig, _clock: StartClock) -> bool:
        check_models(config)
        points.append(config)
        return False

    all_here = Ranks(rank=0, size=num_ranks, local_rank=0, local_size=num_ranks)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    exit_code = run.main(start.words, ranks=all_here, act=note, warns=False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if exit_code or not points:
        return exit_code
    if start.sentence:
        complain(start.sentence)
    relay = SignalRelay()
    from llama_ssp.run.commands.ranks import agent  # noqa: PLC0415 - torch takes seconds to import

    return agent.run_ranks([sys.executable, *sys.orig_argv[1:]], num_ranks=num_ranks, relay=relay)
