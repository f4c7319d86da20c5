"""Runs `launch/run.py` as a user does, alone or under torchrun, or as ranks that are forked.

A start of Python with torch takes seconds. Where a test is not about starts, its ranks are forks of one process that
has imported everything, and know each other as ranks of torchrun do.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeAlias, TypeVar

from llama_ssp.ranks.process import listen
from tests.helpers.repository import ROOT

Popen: TypeAlias = "subprocess.Popen[str]"
Seen = TypeVar("Seen")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["tests.distributed.ranks", "llama_ssp.run.pipeline", "llama_ssp.extensions.reports.html", "hydra._internal.hydra"]
)


def command(overrides: Sequence[str], *, num_ranks: int = 1) -> list[str]:
    """The command line of a run: plain python for one rank, torchrun for several."""
    if num_ranks == 1:
        return [sys.executable, "launch/run.py", *overrides]
    return [*TORCHRUN, str(num_ranks), "launch/run.py", *overrides]


@contextmanager
def started(
    words: Sequence[str], *, cwd: Path = ROOT, env: Mapping[str, str] | None = None, stdout: int = subprocess.PIPE
) -> Iterator[Popen]:
    """A process without standard input, whose standard error can be read; it is killed in the end."""
    process = subprocess.Popen(
        words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def on_forks(num_ranks: int, act: Callable[[int], Seen]) -> list[Seen]:
    """What each of some ranks returns, which are forks; one that dies ends them all."""
    with ProcessPoolExecutor(num_ranks, mp_context=_FORKS) as pool:
        return [*pool.map(partial(_as_rank, act, num_ranks, _free_port()), range(num_ranks))]


def run(
    overrides: Sequence[str], *, num_ranks: int = 1, cwd: Path = ROOT, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run on forks to the end, perhaps with more in the environment.

    The exit code, which is not checked, is that of the rank that failed first.
    """
    code, port = 0, _free_port()
    with tempfile.TemporaryDirectory() as folder:
        be = partial(_be_run, overrides, {**os.environ, **(more or {})}, cwd, Path(folder))
        ranks = [_FORKS.Process(target=_as_rank, args=(be, num_ranks, port, rank)) for rank in range(num_ranks)]
        for rank in ranks:
            rank.start()
        try:
            while waiting := [rank for rank in ranks if rank.exitcode is None]:
                for rank in waiting if code else ():  # as torchrun does
                    rank.terminate()
                assert wait([rank.sentinel for rank in waiting], timeout=240)
                code = code or next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        finally:
            for rank in ranks:
                rank.kill()
        said = [(Path(folder) / f"{rank}.{name}").read_text() for name in ("out", "err") for rank in range(num_ranks)]
    return subprocess.CompletedProcess(overrides, code, "".join(said[:num_ranks]), "".join(said[num_ranks:]))


def _free_port() -> int:
    with listen("127.0.0.1") as free:
        port: int = free.getsockname()[1]
    return port


def _as_rank(act: Callable[[int], Seen], num_ranks: int, port: int, rank: int) -> Seen:
    if num_ranks > 1:
        known = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ.update({name: str(value) for name, value in {**known, "MASTER_PORT": port}.items()})
    return act(rank)


def _be_run(overrides: Sequence[str], environ: Mapping[str, str], cwd: Path, folder: Path, rank: int) -> None:
    """Run `launch/run.py` as a process of its own would."""
    os.environ.update(environ)
    os.chdir(cwd)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.path[:0] = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = ["launch/run.py", *overrides]
    runpy.run_path(str(ROOT / "launch/run.py"), run_name="__main__")
