"""`llama-ssp run` on a rank: under torchrun, under srun, on a rank of its own, or alone.

Reads and checks the whole config before anything is loaded and before the ranks meet, then calls `run.pipeline`.
Errors become sentences and exit codes only here. torch is imported after the checks, so that mistakes show at once.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from llama_ssp import catalogue
from llama_ssp.errors import ConfigError, InterruptedRun, LostRankError, SspError
from llama_ssp.ranks.cores import LOAD, wait_by_load
from llama_ssp.ranks.process import Ranks, check_docstrings, find_agent, handle_signals, ignore_signals, read_ranks
from llama_ssp.registry import imported, load_plugins
from llama_ssp.run import startup
from llama_ssp.run.commands import help as help_page
from llama_ssp.run.commands.options import Options
from llama_ssp.run.commands.points import Point, check_here, for_all, points_of, repeated
from llama_ssp.run.tasks import dry_run
from llama_ssp.settings import checks
from llama_ssp.settings.compose import COMPLETIONS, complete, compose
from llama_ssp.settings.launchers import launcher_with
from llama_ssp.settings.schema import RunConfig
from llama_ssp.terminal.unread import complain, until_unread
from llama_ssp.text.messages import visible

SILENCE_S = 5.0
"""Time that ranks above 0 wait after an error: launchers end all when one has ended; rank 0 must report first."""
RUN_DIR_FILE = "RUN_DIR_FILE"
"""Environment variable: a file for the run folder, where launch/slurm.sbatch checks whether a job makes progress."""

_failures: list[SspError] = []  # hold the frames of a failed run: freeing its graphs could wait for a stuck GPU

Act = Callable[[RunConfig, startup.StartClock], bool]
"""Does what a checked config says; returns whether a stop came too late for its task."""


def task_code() -> Act:
    """Import what runs one point on this rank."""
    wait_by_load(LOAD, os.environ)
    with startup.importing_torch():
        from llama_ssp.run import pipeline
    return pipeline.run


def main(
    words: Sequence[str] | None = None, *, ranks: Ranks | None = None, act: Act | None = None, warns: bool = True
) -> int:
    """Run the command line; returns the exit code of this rank.

    Args:
        words: settings and options; by default this process's.
        ranks: this rank among all; by default as torchrun or srun has set it.
        act: what to do with each checked point; by default its task.
        warns: whether rank 0 warns of settings without effect, also where nothing is printed of a point.
    """
    known = ranks or read_ranks(os.environ)
    arguments = list(sys.argv[1:] if words is None else words)
    return as_rank(known, lambda interrupt: _launch(arguments, known, act, interrupt, warns=warns))


def as_rank(ranks: Ranks, do: Callable[["_Interrupt"], None]) -> int:
    """Call `do` as one rank of a run, and return the exit code of this rank.

    Signals interrupt the call, and so does the end of the rank's agent.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a lost rank is reported in a sentence, not in C++ stacks
    exit_code, interrupt = 0, _Interrupt()
    with until_unread(sys.stdout):
        try:
            handle_signals(interrupt)
            if agent := find_agent():
                agent.heed_end()
            do(interrupt)
        except (Exception, KeyboardInterrupt) as error:
            known = interrupt.hidden_by(error)
            if not isinstance(known, SspError):
                raise
            _failures.append(known)
            exit_code = fail(known, ranks)
    return exit_code


class _Interrupt:
    """Signal handler that treats every signal as Ctrl-C, outside of `run.interruption`; a second one changes nothing.

    Libraries may replace the KeyboardInterrupt by an error of their own: Hydra and OmegaConf fail when they clean up
    objects that they have not made yet. While `waits` is set, a signal takes effect only at `heed`. Under srun this
    matters: srun signals all ranks as soon as one has found a mistake, and each of them must still find the same
    mistake, since srun returns the largest exit code.
    """

    def __init__(self) -> None:
        self.has_come = self.waits = self._is_due = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        self._is_due = True
        if not self.waits:
            self.heed()

    def heed(self) -> None:
        """Raise KeyboardInterrupt if a signal has come; from now on signals raise it at once."""
        self.waits = False
        if self._is_due:
            self.has_come = True
            raise KeyboardInterrupt

    def hidden_by(self, error: BaseException) -> BaseException:
        """Return InterruptedRun if the error is a consequence of a signal, else the error itself.

        An SspError that knows which rank reports it, or that is an InterruptedRun already, is returned as it is.
        """
        is_known = isinstance(error, SspError) and (error.speaks is not None or isinstance(error, InterruptedRun))
        hides = isinstance(error, KeyboardInterrupt) or (self.has_come and not is_known)
        return InterruptedRun("interrupted") if hides else error


def fail(error: SspError, ranks: Ranks) -> int:
    """Report an error once: rank 0 does, unless the error says which rank; the other ranks wait to be ended.

    Returns the code that this rank ends with.
    """
    if error.speaks or (error.speaks is None and ranks.rank == 0):
        complain(str(error))
    if error.speaks is None and ranks.rank > 0:
        with suppress(KeyboardInterrupt):
            time.sleep(SILENCE_S)
    return error.exit_code


def _launch(arguments: list[str], ranks: Ranks, act: Act | None, interrupt: _Interrupt, *, warns: bool) -> None:
    """Do what the options say, by default run one point after the other."""
    interrupt.waits = ranks.rank > 0
    load_plugins()
    options = read_options(arguments)
    if options.help or options.shell_completion or options.cfg:
        if ranks.rank == 0:
            _show(options)
        return
    composed = compose(options.words, multirun=options.multirun)
    points, of_sweep = points_of(composed), options.multirun
    if of_sweep and _is_submitted(points, composed[0].launcher, ranks):
        return
    failed = _run_points(points, ranks, act, interrupt, of_sweep=of_sweep, warns=warns)
    if of_sweep and ranks.rank == 0 and warns:
        from llama_ssp.run.sweep import show_table

        with until_unread(sys.stdout):
            show_table([point.run_dir for point in points])
    if failed:
        raise type(failed[0][1])(
            f"{len(failed)} of {len(points)} points failed, {', '.join(point.place.name for point, _ in failed)}; the "
            "same command with the same run_dir repeats only what failed"
        )


def _run_points(
    points: Sequence[Point], ranks: Ranks, act: Act | None, interrupt: _Interrupt, *, of_sweep: bool, warns: bool
) -> list[tuple[Point, SspError]]:
    """Run one point after the other until one of them is stopped; returns the points that failed, each with its error.

    An error is raised if a single run fails, or a point on several ranks, whose groups may then be in any state.
    """
    is_to_stop, failed = False, list[tuple[Point, SspError]]()
    for point in points:
        if interrupt.has_come:  # and is not handled yet
            raise KeyboardInterrupt
        if is_to_stop:
            sentence = f"interrupted before {point.place.name}; the same command with the same run_dir"
            raise InterruptedRun(f"{sentence} goes on from here")
        if point.number:
            gc.collect()  # frees the models of the last point: its objects refer to each other
        try:
            checked = _check(point, ranks, of_sweep=of_sweep, warns=warns)
            interrupt.heed()
            is_to_stop = checked is not None and _act(act or task_code(), *checked, of_sweep=of_sweep)
        except SspError as error:
            if not of_sweep or ranks.size > 1 or isinstance(error, InterruptedRun | LostRankError):
                raise
            complain(f"{point.name}: {error}")
            failed.append((point, type(error)(str(error))))  # another error, since this one holds the models
    return failed


def _act(act: Act, run: RunConfig, clock: startup.StartClock, *, of_sweep: bool) -> bool:
    try:
        return act(run, clock)
    except InterruptedRun as error:
        if error.run_dir and of_sweep:
            raise InterruptedRun.in_folder(str(Path(error.run_dir).parent)) from error
        raise
    except BrokenPipeError as error:  # not of standard output: the run handles that itself
        raise RuntimeError(f"a connection was lost: {error}") from error


def _show(options: argparse.Namespace) -> None:
    """Print the help, candidates for a shell, or the composed settings."""
    if options.help:
        help_page.show(options.words)
    elif options.shell_completion:
        complete(options.shell_completion)
    else:
        (composed,) = compose(options.words)
        print(visible(composed.to_yaml(resolve=options.resolve)), end="")


def _is_submitted(points: Sequence[Point], settings: object, ranks: Ranks) -> bool:
    """Check all points of a sweep; if a launcher submits them as jobs, submit them and return True."""
    for sentence in repeated(points) if ranks.rank == 0 else ():
        complain(f"warning: {sentence}")
    launcher = launcher_with(settings)
    if launcher is None:
        for_all(points, lambda point: check_here(point, ranks))
        return False
    if ranks.size > 1:
        raise ConfigError(
            f"hydra/launcher={launcher.name} submits each job once: start it with plain python, on one rank"
        )
    imported(launcher.run, setting=f"hydra/launcher={launcher.name}")(points, settings)
    return True


def _check(point: Point, ranks: Ranks, *, of_sweep: bool, warns: bool) -> tuple[RunConfig, startup.StartClock] | None:
    """Check the config of a run or of a point of a sweep; returns what its task needs, or None after a dry run."""
    clock = startup.StartClock(age_s=0.0 if point.number else startup.process_age_s())
    run = replace(point.run, run_dir=str(point.run_dir), place=point.place) if of_sweep else point.run
    if not run.reads_files:
        run = dry_run.with_sizes(run)
    run, unread = checks.check(run, point.explicit, world_size=ranks.size, of_sweep=of_sweep)
    if ranks.rank == 0 and (warns or run.dry_run):
        for found in unread:
            complain(f"warning: at {point.place.name}, {found}")
    if run.dry_run:
        if ranks.rank == 0:
            with until_unread(sys.stdout):
                if run.place:
                    print(visible(f"{run.place.title}\n"))
                dry_run.dry_run(run, world_size=ranks.size)
        return None
    check_docstrings()
    if ranks.rank == 0 and (file := os.environ.get(RUN_DIR_FILE)):
        Path(file).write_text(f"{run.run_dir}\n", encoding="utf-8")
    clock.reach("composed_s")
    return run, clock


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of `llama-ssp run`, such as `-m`; all other `words` are settings.

    The folder of `--config-dir` is searched from now on. Raises ConfigError for bad options.
    """
    hint = ": settings are written name=value, for example model=7B, and --help all lists them"
    parser = Options("", None, hint=hint)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("--resolve", action="store_true")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--multirun", action="store_true")
    kinds.add_argument("-c", "--cfg", choices=["job"])
    kinds.add_argument("-sc", "--shell-completion", "--shell_completion", choices=COMPLETIONS)
    options = parser.parse_intermixed_args(arguments)
    catalogue.use(options.config_dir)
    if options.resolve and not (options.cfg or options.help):
        raise ConfigError("--resolve needs --cfg: --cfg job --resolve")
    return options
