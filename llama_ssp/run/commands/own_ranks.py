"""`llama-ssp run`: as a rank that exists already, in this process alone, or on ranks that it starts itself.

`ranks=N` is a word of `llama-ssp run`, no setting: it changes no text, and a config has no such key. All mistakes of
the command line, and models that the engine does not run, are found before a rank is started: in one sentence, with the
true exit code, without torch.
"""

import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from llama_ssp.errors import ConfigError, LostRankError
from llama_ssp.ranks.cores import LOAD, wait_by_load
from llama_ssp.ranks.process import Ranks, launcher_of, read_ranks, signals_kept
from llama_ssp.run.commands import run
from llama_ssp.run.lengths import check_lengths
from llama_ssp.run.startup import StartClock, importing_torch
from llama_ssp.run.tasks.dry_run import check_models
from llama_ssp.settings.backends import backends
from llama_ssp.settings.launchers import LAUNCHER, LAUNCHERS
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import task_of
from llama_ssp.terminal.unread import complain

_NODES = "several nodes are started by sbatch launch/slurm.sbatch, or by torchrun --nnodes with launch/run.py"
_MOST_PER_CORE = 8
_SCRIPT = "--script"
_DEVICES = Path("/dev")
_KINDS = ("placement", "placement.target.kind")
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


class Start(NamedTuple):
    """The ranks that a command line asks for, with its other words."""

    words: list[str]
    num_ranks: int | None  # to start; None if this process is a rank that torchrun or srun has started.
    sentence: str | None = None  # the first line of the run; None where nothing new needs to be said.


def read_start(words: Sequence[str], environ: Mapping[str, str], *, default: int | None) -> Start:
    """Read `ranks=` and take it out of the words.

    If the words do not say, there are `default` ranks; if that is None, one rank on each GPU that the run can use, or
    one.

    Raises ConfigError for a number of ranks that is invalid or cannot be started here, and for one that differs from
    the number that a launcher has started according to `environ`.
    """
    given = [word.partition("=")[2] for word in words if word.startswith("ranks=")]
    others = [word for word in words if not word.startswith("ranks=")]
    wanted = _number(given) if given else None
    is_shell = (wanted or 1) > 1 and "SLURM_PTY_PORT" in environ  # of `srun --pty`: its first task starts them
    if not is_shell and (launcher := launcher_of(environ)):
        size = read_ranks(environ).size
        if wanted not in {None, size}:
            raise ConfigError(f"ranks={wanted}: {launcher} has started {size} already, so leave ranks= out")
        return Start(words=others, num_ranks=None)
    if launchers := [word.partition("=")[2].strip("'\"") for word in others if word.startswith("hydra/launcher=")]:
        jobs = LAUNCHERS.find(launchers[-1])
        if given and jobs:
            key = f"{LAUNCHER}.{jobs.ranks_setting}"
            raise ConfigError(f"ranks={wanted} has no effect on jobs: {key}={wanted} sets theirs")
        if not given:
            return Start(words=others, num_ranks=1)
    if wanted is None and default is not None:
        return Start(words=others, num_ranks=default)
    num_ranks, why = wanted or 1, ""
    # Each keeps the ranks of this machine in one process, which takes the GPUs itself or needs none.
    on_one_rank = {f"{key}={name}" for name, backend in backends().items() if backend.is_layer_wise for key in _KINDS}
    if wanted is None and {"device=cpu", *on_one_rank} & set(others):
        why = " (ranks=N starts more)"
    elif wanted is None:
        gpus = num_gpus(environ)
        num_ranks, reason = max(gpus, 1), "one for each GPU" if gpus else "since no GPU was found"
        why = f", {reason} (ranks=N starts another number)"
    counted = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return Start(words=others, num_ranks=num_ranks, sentence=f"starting {counted}{why}…")


def _number(given: Sequence[str]) -> int:
    shown = " ".join(f"ranks={value}" for value in given)
    if len(given) > 1:
        raise ConfigError(f"{shown}: give ranks= once")
    if not re.fullmatch(r"[1-9]\d*", given[0]):
        raise ConfigError(
            f"{shown} must be one whole number from 1 on, of the processes on this machine, such as ranks=2; {_NODES}"
        )
    most = max(_MOST_PER_CORE * (os.cpu_count() or 1), num_gpus(os.environ))
    if int(given[0]) > most:
        raise ConfigError(f"{shown} must be at most {most} on this machine, which has {os.cpu_count()} cores; {_NODES}")
    return int(given[0])


def num_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that torch would see, without torch: by the environment, else by the device files."""
    with suppress(PackageNotFoundError):  # a torch without metadata
        if version("torch").endswith("+cpu"):
            return 0
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            named = [gpu.strip() for gpu in environ[name].split(",")]
            return named.index("-1") if "-1" in named else len([gpu for gpu in named if gpu])
    nvidia = [file for file in _DEVICES.glob("nvidia[0-9]*") if file.name.removeprefix("nvidia").isdigit()]
    return len(nvidia) or sum(_is_gpu(node / "properties") for node in _AMD_NODES.glob("*"))


def _is_gpu(properties: Path) -> bool:
    """Whether a node that AMD's driver lists is a GPU, which has vector units; the driver lists CPUs too."""
    with suppress(OSError):
        return re.search(r"^simd_count [1-9]", properties.read_text(encoding="ascii"), re.MULTILINE) is not None
    return False


def main(words: Sequence[str], *, num_ranks: int | None) -> int:
    """Run the command line, and return the exit code.

    `num_ranks` is the default of `ranks=`, as `default` of `read_start`.
    """
    place = [*words, _SCRIPT].index(_SCRIPT)
    words, script = words[:place], words[place + 1 :] if place < len(words) else None
    try:
        start = read_start(words, os.environ, default=num_ranks)
        if script is not None:
            _check_script(script, start.words)
    except ConfigError as error:
        return run.fail(error, read_ranks(os.environ))
    if script is not None:
        return _start_ranks(start) if (start.num_ranks or 1) > 1 else _run_script(script)
    if start.num_ranks is None:
        return run.main(start.words)
    size, points = start.num_ranks, list[RunConfig]()

    def act(config: RunConfig, clock: StartClock) -> bool:
        """Run the point on one rank; for several, which each check and run it, only note it."""
        check_models(config, world_size=size)
        check_lengths(config)
        points.append(config)
        if size > 1:
            return False
        if start.sentence and len(points) == 1:
            complain(start.sentence)
        return run.task_code()(config, clock)

    if size == 1:
        return run.main(start.words, act=act)
    as_rank_0 = Ranks(rank=0, size=size, local_rank=0, local_size=size)
    with signals_kept():
        exit_code = run.main(start.words, ranks=as_rank_0, act=act, warns=False)
    if exit_code or not points:
        return exit_code
    return _start_ranks(start, if_lost=task_of(points[0]).if_lost)


def _start_ranks(start: Start, *, if_lost: str = LostRankError.remedy) -> int:
    """Run the command line of this process on ranks of their own; returns the exit code."""
    assert start.num_ranks, "there are ranks to start"
    if start.sentence:
        complain(start.sentence)
    wait_by_load(LOAD, os.environ)
    with importing_torch():
        from llama_ssp.run.commands import agent
    return agent.run_ranks([sys.executable, *sys.orig_argv[1:]], num_ranks=start.num_ranks, if_lost=if_lost)


def _check_script(script: Sequence[str], others: Sequence[str]) -> None:
    if not script:
        raise ConfigError("--script needs a file: llama-ssp run ranks=2 --script study.py ARGUMENT ...")
    if others:
        raise ConfigError(f"{others[0]} has no effect on a script, which gives its settings to load() and generate()")
    if not Path(script[0]).is_file():
        raise ConfigError(f"--script {script[0]}: there is no such file")


def _run_script(script: Sequence[str]) -> int:
    """Run a Python script on this rank, as `python FILE ARGUMENT ...` does; returns the exit code."""
    code: object = None

    def do(_: object) -> None:
        nonlocal code
        sys.argv[:], sys.path[0] = script, str(Path(script[0]).resolve().parent)
        try:
            runpy.run_path(script[0], run_name="__main__")
        except SystemExit as error:
            code = error.code

    exit_code = run.as_rank(read_ranks(os.environ), do)
    if isinstance(code, str):
        complain(code)
    return exit_code or (code if isinstance(code, int) else bool(code))
