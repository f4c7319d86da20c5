"""`llama-ssp run` on a rank: under torchrun, under srun, on a rank of its own, or alone.

Reads and checks the whole config before anything is loaded and before the ranks meet, then calls `llama_ssp.tasks`.
Errors become sentences and exit codes only here. torch is imported after the checks, so that mistakes show at once.
"""

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llama_ssp.commands import command_line, completion, topics
from llama_ssp.commands.options import until_unread
from llama_ssp.commands.points import launching
from llama_ssp.commands.ranks import torchrun
from llama_ssp.commands.short_keys import ShortKeys
from llama_ssp.config import checks, folders, store
from llama_ssp.config.registry import load_plugins
from llama_ssp.config.schema import RunConfig
from llama_ssp.console.unread import complain
from llama_ssp.distributed.environment import Ranks, read_ranks
from llama_ssp.distributed.signals import find_agent, handle_signals, ignore_signals
from llama_ssp.errors import InterruptedRun, SspError
from llama_ssp.session import startup
from llama_ssp.tasks import dry_run
from llama_ssp.visible import VisibleStream

sys.path.append(str(folders.conf_dir().parent / "launch"))  # where Hydra looks for the package hydra_plugins

EXIT_CODE_FILE = "EXIT_CODE_FILE"
"""Environment variable: a file for rank 0's exit code, which torchrun does not pass on to launch/slurm.sbatch."""
RUN_DIR_FILE = "RUN_DIR_FILE"
"""Environment variable: a file for the run folder, where launch/slurm.sbatch checks whether a job makes progress."""


_failures: list[SspError] = []  # hold the frames of a failed run: freeing its graphs could wait for a stuck GPU


Act = Callable[[RunConfig, startup.StartClock], bool]
"""Does what a checked config says; returns whether somebody stopped it too late for its task."""


def task_code() -> Act:
    """Import what runs one point on this rank."""
    from llama_ssp.tasks import run as task  # noqa: PLC0415 - torch takes seconds to import

    return task.run


def main(
    words: Sequence[str] | None = None, *, ranks: Ranks | None = None, act: Act | None = None, warns: bool = True
) -> int:
    """Run the command line; returns the exit code of this rank.

    Args:
        words: settings and options; by default those of this process.
        ranks: this rank among all; by default as torchrun or srun has set it.
        act: what to do with each checked point; by default its task.
        warns: whether rank 0 warns of settings without effect, also where nothing is printed of a point.
    """
    ranks = ranks or read_ranks(os.environ)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost rank is reported in a sentence, not in C++ stacks
    exit_code, interrupt = 0, _Interrupt()
    with until_unread():
        try:
            handle_signals(interrupt)
            if agent := find_agent():
                agent.heed_end()
            points = _Points(ranks, act, interrupt, warns=warns)
            _launch(list(sys.argv[1:] if words is None else words), ranks, points)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - `_report` raises what nobody has foreseen
            exit_code = _report(interrupt.hidden_by(error), ranks)
        except SystemExit as end:  # Hydra ends so after its own help
            exit_code = int(bool(end.code))
    if ranks.rank == 0 and (file := os.environ.get(EXIT_CODE_FILE)):
        Path(file).write_text(f"{exit_code}\n", encoding="ascii")
    return exit_code


class _Interrupt:
    """Handles a signal as Ctrl-C is handled, outside of `session.stopping`; a second signal changes nothing.

    Libraries may replace the KeyboardInterrupt: Hydra and OmegaConf clean up what they have not made yet, and fail.

    Attributes:
        has_come: a signal has.
    """

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True
        ignore_signals()
        raise KeyboardInterrupt

    def hidden_by(self, error: BaseException) -> BaseException:
        """Return the interrupt that an error stands for; the error itself without one, or if it knows more of it."""
        is_settled = isinstance(error, SspError) and (error.speaks is not None or isinstance(error, InterruptedRun))
        return KeyboardInterrupt() if self.has_come and not is_settled else error


def _report(error: BaseException, ranks: Ranks) -> int:
    """Say in a sentence why the run has ended, and return its exit code; raises an error that nobody has foreseen."""
    if isinstance(error, KeyboardInterrupt):
        return fail("interrupted", InterruptedRun.exit_code, ranks)
    if isinstance(error, SspError):
        _failures.append(error)
        return fail(str(error), error.exit_code, ranks, speaks=error.speaks)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return fail(command_line.one_sentence(error), SspError.exit_code, ranks)
    raise error


def fail(sentence: str, exit_code: int, ranks: Ranks, *, speaks: bool | None = None) -> int:
    """Report an error once: rank 0 does, unless the error says which rank; the other ranks wait to be ended.

    Returns the code that this rank ends with, which under torchrun is 0 where rank 0 has reported the same.
    """
    if speaks or (speaks is None and ranks.rank == 0):
        complain(sentence)
    if speaks is None and ranks.rank == 0:
        torchrun.report(sentence, ranks)
    elif speaks is None and torchrun.await_report(ranks):
        return 0
    return exit_code


def _launch(arguments: list[str], ranks: Ranks, points: "_Points") -> None:
    """Check the names on the command line, and let Hydra compose a config per run."""
    load_plugins()
    options = command_line.read_options(arguments)
    # Where a further setting may be inserted: Hydra wants all of them next to each other.
    place = arguments.index(options.overrides[0]) if options.overrides else len(arguments)
    if options.help or options.hydra_help or options.shell_completion or options.info:
        if ranks.rank > 0:
            return
        if options.help:
            topics.show(options.overrides)
            return
        if options.shell_completion and not options.hydra_help:
            completion.check(options.overrides)
    else:
        short = ShortKeys(options.overrides)
        literal = partial(command_line.take_literally, multirun=options.multirun)
        arguments, overrides = (
            [literal(short.complete(word)) for word in words] for words in (arguments, options.overrides)
        )
        command_line.check_overrides(overrides, multirun=options.multirun)
        command_line.check_launcher(overrides, multirun=options.multirun)
    store.register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    scratch = _scratch_folder(multirun=options.multirun)
    with scratch as for_sweeps, _printing(options), _mode_by_options(), launching(ranks):
        arguments[place:place] = for_sweeps
        sys.argv[1:] = arguments
        hydra.main(config_path=str(folders.conf_dir()), config_name="config", version_base="1.3")(points.run)()
    if points.failure:
        raise points.failure


def _printing(options: argparse.Namespace) -> AbstractContextManager[object]:
    """Make control characters visible in what Hydra itself prints."""
    if options.shell_completion and not options.hydra_help and completion.is_query(options.overrides):
        return completion.answering()
    if options.hydra_help or options.shell_completion or options.info or options.cfg:
        return contextlib.redirect_stdout(VisibleStream(sys.stdout))
    return contextlib.nullcontext()


@contextlib.contextmanager
def _mode_by_options() -> Iterator[None]:
    """Let options alone say whether this is a sweep: Hydra composes a config to ask it too, a fifth of a second."""
    asking = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = asking  # type: ignore[method-assign]


@contextlib.contextmanager
def _scratch_folder(*, multirun: bool) -> Iterator[list[str]]:
    """Give Hydra a temporary folder for its own record of a sweep, which all ranks would write to one place."""
    if not multirun:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        yield [f"hydra.sweep.dir={folder}"]


class _Points:
    """Runs the points of a sweep, or the only one, until one of them fails or is stopped."""

    def __init__(self, ranks: Ranks, act: Act | None, interrupt: _Interrupt, *, warns: bool) -> None:
        self.failure: Exception | None = None
        self._ranks, self._act, self._interrupt, self._warns = ranks, act, interrupt, warns
        self._is_to_stop = self._has_run = False

    def run(self, config: DictConfig) -> None:
        """Run one point, as Hydra composed it."""
        if self._interrupt.has_come:  # and nobody has heard
            raise KeyboardInterrupt
        if self._is_to_stop and not self.failure:
            number = HydraConfig.get().job.num
            sentence = f"interrupted before point {number} of the sweep; the same command with the same run_dir goes on"
            self.failure = InterruptedRun(f"{sentence} from here")
        if self.failure:
            return
        try:
            if checked := _check(config, self._ranks, warns=self._warns):
                if self._has_run:
                    gc.collect()  # frees the models of the last point: its objects refer to each other
                self._has_run = True
                act = self._act or task_code()
                self._is_to_stop = act(*checked)
        except (SspError, HydraException, OmegaConfBaseException) as error:
            self.failure = error
            if isinstance(error, InterruptedRun) and error.run_dir and HydraConfig.get().mode is RunMode.MULTIRUN:
                self.failure = InterruptedRun.in_folder(str(Path(error.run_dir).parent))
        except BrokenPipeError as error:  # not of standard output: the run handles that itself
            raise RuntimeError(f"a connection was lost: {error}") from error


def _check(config: DictConfig, ranks: Ranks, *, warns: bool) -> tuple[RunConfig, startup.StartClock] | None:
    """Check one config; returns what its task needs, or None after a dry run."""
    hydra_config = HydraConfig.get()
    of_sweep = hydra_config.mode is RunMode.MULTIRUN
    is_later_point = of_sweep and hydra_config.job.num > 0
    clock = startup.StartClock(age_s=0.0 if is_later_point else startup.process_age_s())
    # Without filling in ${...}: the result would be parsed as a part of the setting.
    overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
    explicit = command_line.explicit_keys(cast("list[str]", overrides))
    run = store.to_run_config(config, explicit=explicit)
    dry_run.settle_synthetic(run)
    for unread in checks.check(run, explicit, world_size=ranks.size, of_sweep=of_sweep):
        if ranks.rank == 0 and (warns or run.dry_run):
            complain(f"warning: at point {hydra_config.job.num} of the sweep, {unread}")
    if of_sweep:
        run.run_dir = f"{run.run_dir}/{hydra_config.job.num}"

    if run.dry_run:
        if ranks.rank == 0:
            with until_unread():
                dry_run.dry_run(run, world_size=ranks.size)
        return None

    checks.check_docstrings()
    if ranks.rank == 0 and (file := os.environ.get(RUN_DIR_FILE)):
        Path(file).write_text(f"{run.run_dir}\n", encoding="utf-8")
    clock.reach("composed_s")
    return run, clock
