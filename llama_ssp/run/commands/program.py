"""The program `llama-ssp`: finds the command, reads its options, and ends the process with its exit code."""

import atexit
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from llama_ssp.errors import ConfigError, InterruptedRun, unknown_name
from llama_ssp.ranks.process import handle_signals, heeded_signals, ignore_signals, read_ranks
from llama_ssp.registry import imported
from llama_ssp.terminal.unread import complain, open_closed, until_unread

if TYPE_CHECKING:  # imports nothing slow before Ctrl-C is handled
    from llama_ssp.settings.commands import Command

_AFTER = """
`llama-ssp COMMAND --help` explains a command. Several nodes: launch/slurm.sbatch, or torchrun with launch/run.py."""


def main(words: Sequence[str] | None = None, *, num_ranks: int | None = None) -> NoReturn:
    """Do what the command line says, by default this process's, and end the process.

    Nothing slow is imported before Ctrl-C is handled; each command imports what it needs. `num_ranks` is the number of
    ranks of `run` where the words do not say; by default one for each GPU.
    """
    open_closed()
    handle_signals(_end_at_once)
    # `llama-ssp run` starts its ranks with the signals blocked, which then wait until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heeded_signals())
    try:
        read_ranks(os.environ)
    except ConfigError as error:  # no rank knows which one speaks
        complain(str(error))
        sys.exit(error.exit_code)
    _leave(_exit_code(list(sys.argv[1:] if words is None else words), num_ranks))


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    """End this process; the handler while modules are imported, or while a command runs that an end cannot harm."""
    if read_ranks(os.environ).rank == 0:
        os.write(2, b"interrupted\n")
    os._exit(InterruptedRun.exit_code)


def _exit_code(words: list[str], num_ranks: int | None) -> int:
    from llama_ssp.settings.commands import COMMANDS

    name, *rest = words or ["--help"]
    if "--version" in words[:2]:
        return _show(_version())
    if name in {"--help", "-h"}:
        return _show(
            "\n".join([*(command.line for command in COMMANDS.all().values()), "    llama-ssp --version", _AFTER])
        )
    if name in {"-sc", "--shell-completion"}:
        from llama_ssp.run.commands import run

        return run.main(words)
    command = COMMANDS.find(name)
    problem = _gone() if command else _unknown_command(words, sorted(COMMANDS.all()))
    if command is None or problem:
        complain(problem)
        return ConfigError.exit_code
    if command.run:
        return int(imported(command.run, setting=name)(rest))
    from llama_ssp.run.commands import own_ranks

    return own_ranks.main(of_task(command, rest) if command.task else rest, num_ranks=num_ranks)


def _gone() -> str:
    """Report a working folder that has been removed: Hydra, torch and relative paths need it. Empty if it is there."""
    try:
        Path.cwd()
    except OSError as error:
        return f"the working folder is gone ({str(error.strerror).lower()}): change to a folder that exists"
    return ""


def _unknown_command(words: Sequence[str], known: Sequence[str]) -> str:
    """Report a first word that is no command of the program."""
    from llama_ssp.settings.compose import as_settings

    if "=" in words[0] or words[0].startswith("-"):
        return f"{words[0]} follows a command, such as llama-ssp run {words[0]}; the commands are {', '.join(known)}"
    if settings := as_settings([word for word in words if "=" not in word]):
        others = [word for word in words if "=" in word]
        return f"{words[0]!r} is no command: write llama-ssp run {' '.join([settings, *others])}"
    return unknown_name("command", words[0], known)


def of_task(command: "Command", words: list[str]) -> list[str]:
    """Return the words of `run` that do what the command of a task says."""
    task = command.task
    if {"--help", "-h"} & {*words}:
        return ["--help", f"task={task}"]
    if command.address:
        words = [
            f"{command.address}={word}" if word.split("://")[0].isalpha() and ":" in word else word for word in words
        ]
    return [f"task={task}", *(word for word in words if word != f"task={task}")]


def _show(text: str) -> int:
    with until_unread(sys.stdout):
        print(text)
    return 0


def _version() -> str:
    from llama_ssp.reports.provenance import git_commit, versions

    known, commit = versions(), git_commit()
    others = [f"{name} {known[name]}" for name in ("python", "torch", "transformers") if known[name]]
    others += [f"commit {commit[:12]}"] if commit else []
    return f"llama-ssp {known['llama_ssp'] or 'unknown'} ({', '.join(others)})"


def _leave(exit_code: int) -> NoReturn:
    """End this process.

    One of several ranks ends without finalizing the interpreter: a torch thread that wakes up during finalization would
    abort the process. A failed rank also skips exit handlers, which would wait for ranks that may be lost. An
    interrupted process skips finalization too, because the interpreter would end it by SIGINT if the interrupt came in
    an `exec` of some library.
    """
    ignore_signals()
    is_one_of_several = read_ranks(os.environ).size > 1
    if is_one_of_several or exit_code == InterruptedRun.exit_code:
        try:
            if not (is_one_of_several and exit_code):
                atexit._run_exitfuncs()
            sys.stdout.flush()
        finally:
            os._exit(exit_code)
    handle_signals(signal.SIG_IGN)  # the interpreter frees functions while it ends
    sys.exit(exit_code)
