"""Opens a run on every rank, its folder and its logs, and writes to the folder how the run ended.

`ranks/NNN.log` is the log of a rank. `run.log` is rank 0's, whose warnings also go to standard error.
"""

import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from llama_ssp.errors import InterruptedRun, LostRankError, SspError
from llama_ssp.machines.machine import gpu_links
from llama_ssp.ranks.failures import Phase, guard, raise_on_all_ranks, unify_failure
from llama_ssp.ranks.process import read_ranks
from llama_ssp.ranks.world import World, start
from llama_ssp.reports.folder import RunFolder, read_status, write_failure
from llama_ssp.reports.provenance import git_commit, processor, versions
from llama_ssp.reports.reading import to_yaml
from llama_ssp.reports.records import kind_of_results
from llama_ssp.run.startup import StartClock
from llama_ssp.settings.schema import RunConfig
from llama_ssp.settings.tasks import task_of
from llama_ssp.terminal.terminal import Terminal
from llama_ssp.terminal.unread import complain
from llama_ssp.text.messages import visible

_OURS = __name__.partition(".")[0]
_log = logging.getLogger(__name__)


@contextmanager
def joined(config: RunConfig, clock: StartClock) -> Iterator[tuple[World, Terminal, RunFolder | None, Phase]]:
    """Join the other ranks and, on rank 0, open the run folder; if the block fails, write how into the folder."""
    folder: RunFolder | None = None
    run_dir: Path | None = None

    def record(error: Exception | KeyboardInterrupt) -> None:
        with suppress(SspError):  # a full disk must not hide the reason
            if run_dir:
                _write_end(run_dir, folder, error)
            elif isinstance(error, LostRankError):
                _keep_failed_start(config, error)

    def report(error: SspError) -> None:
        record(error)
        if error.speaks:
            complain(str(error))

    with ExitStack() as joining, ExitStack() as stack:
        try:
            world = joining.enter_context(start(device=config.device, timeout_s=config.timeouts.load_s, report=report))
        except LostRankError as error:
            record(error)
            raise
        clock.reach("joined_s")
        terminal = Terminal.of_rank(world.comm.rank, quiet=config.quiet)
        if world.note:
            terminal.say(world.note)
        limit = f"timeouts.load_s={config.timeouts.load_s:g}"
        phase = Phase(doing="loading", limit=limit, remedy=task_of(config).if_lost)
        try:
            with unify_failure(world.watch, phase), guard(world.watch, world.comm.device_wait, phase, report=report):
                if task_of(config).needs_models:
                    folder = _open_folder(config, world, stack)
                    run_dir = Path(str(config.run_dir))
                    _log_ranks(world, folder)
                yield world, terminal, folder, phase
        except (Exception, KeyboardInterrupt) as error:
            record(error)
            raise


def _keep_failed_start(config: RunConfig, error: LostRankError) -> None:
    """On rank 0, leave a run folder that says why the ranks did not connect."""
    if read_ranks(os.environ).rank == 0 and task_of(config).needs_models:
        with RunFolder(Path(str(config.run_dir)), to_yaml(config)) as folder:
            _open_logs(folder.path, rank=0)
            _log.info("%s: %s", error, error.__cause__)
            _close_logs()
            write_failure(folder.path, exit_code=error.exit_code, sentence=str(error))


def _open_folder(config: RunConfig, world: World, stack: ExitStack) -> RunFolder | None:
    """Open the run folder on rank 0, and a log in it on every rank."""
    folder = None
    with raise_on_all_ranks(world.comm):
        if world.comm.rank == 0:
            kind = kind_of_results(task_of(config))
            folder = stack.enter_context(RunFolder(Path(str(config.run_dir)), to_yaml(config), kind))
    config.run_dir = world.comm.broadcast_text(str(config.run_dir))
    stack.callback(_close_logs)
    _open_logs(Path(config.run_dir), rank=world.comm.rank)
    if folder and not folder.is_locked:
        _log.warning("run_dir=%s is on a file system without locks: let no other run use it meanwhile", folder.path)
    return folder


def _log_ranks(world: World, folder: RunFolder | None) -> None:
    device, comm = world.device, world.comm
    on = f"cpu ({processor()}, {torch.get_num_threads()} threads)"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        on = f"{device} ({properties.name}, {properties.total_memory / 2**30:.1f} GiB)"
    mine = f"rank {comm.rank} of {comm.size} on {platform.node()}, {on}, process {os.getpid()}"
    ranks = comm.gather_text(mine)
    for rank in ranks if folder else [mine]:
        _log.info("%s", rank)
    if folder:
        made_by = versions() | {"commit": git_commit()}
        _log.info(", ".join(f"{name} {version}" for name, version in made_by.items()))
        _log.info("links between GPUs: %s", gpu_links() if device.type == "cuda" else "none, ranks are on CPUs")


def _write_end(run_dir: Path, folder: RunFolder | None, error: Exception | KeyboardInterrupt) -> None:
    """Write the status of a run that failed: on rank 0, or if that may be lost, on the rank that reports the error."""
    if isinstance(error, LostRankError):
        if read_status(run_dir) not in {"running", f"{error.exit_code}: {error}"}:
            error.hush()  # this rank was paused, and the others have already reported its loss
        elif folder or error.speaks:
            write_failure(run_dir, exit_code=error.exit_code, sentence=str(error))
    elif folder and isinstance(error, InterruptedRun | KeyboardInterrupt):
        folder.write_status("interrupted")
    elif folder and isinstance(error, SspError):
        write_failure(run_dir, exit_code=error.exit_code, sentence=str(error))
    elif folder:  # an unexpected error: Python prints its traceback and exits with 1
        message = str(error).strip().partition("\n")[0]
        write_failure(run_dir, exit_code=1, sentence=f"{type(error).__name__}: {message}")


class _VisibleFormatter(logging.Formatter):
    """Makes control characters visible, so that a log can be shown on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class _Warnings(logging.StreamHandler[TextIO]):
    """Shows our warnings; a progress display may have replaced `sys.stderr` since."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _open_logs(run_dir: Path, *, rank: int) -> None:
    logging.raiseExceptions = False  # on a full disk, the run fails when it writes records, not logs
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    (run_dir / "ranks").mkdir(parents=True, exist_ok=True)  # rank 0 may be on a node with another disk
    for path in [f"ranks/{rank:03d}.log", *(["run.log"] if rank == 0 else [])]:
        handler = logging.FileHandler(run_dir / path)
        handler.setFormatter(_VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    if rank == 0:
        shown = _Warnings()
        shown.setLevel(logging.WARNING)
        shown.setFormatter(_VisibleFormatter("%(message)s"))
        shown.addFilter(logging.Filter(_OURS))
        root.addHandler(shown)


def _close_logs() -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler | _Warnings):
            root.removeHandler(handler)
            with suppress(OSError):
                handler.close()
