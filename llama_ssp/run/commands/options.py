"""Command lines: argparse reads their options, and errors are one sentence of ours."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.settings import folders
from llama_ssp.terminal.unread import complain, is_unread, silence
from llama_ssp.visible import visible


class Options(argparse.ArgumentParser):
    """A parser called as `usage`, whose help is `text`, and whose errors are one sentence that ends with a hint."""

    def __init__(self, usage: str, text: str | None, *, hint: str | None = None) -> None:
        super().__init__(
            usage=usage, description=text, formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False, add_help=hint is None,
        )  # fmt: skip
        self._hint = hint or f"; usage: {usage}; --help explains it"

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and the hint."""
        raise ConfigError(message + self._hint)


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
    kinds.add_argument("-sc", "--shell-completion", "--shell_completion", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    folders.use(options.config_dir)
    if options.resolve and not (options.cfg or options.help):
        raise ConfigError("--resolve needs --cfg: --cfg job --resolve")
    return options


@contextmanager
def until_unread() -> Iterator[None]:
    """End the block silently when nobody reads standard output any more: after `| head`, or a terminal that hung up."""
    try:
        yield
        if sys.stdout:  # it may have been closed before
            sys.stdout.flush()
    except OSError as error:
        if not is_unread(sys.stdout, error):
            raise
        silence(sys.stdout)


def run(parser: Options, arguments: Sequence[str], act: Callable[[argparse.Namespace], str | None]) -> int:
    """Read the arguments, act on them, print the closing message that `act` returns, and return the exit code."""
    with until_unread():
        try:
            message = act(parser.parse_intermixed_args(arguments))
        except SystemExit:  # help was requested and printed
            return 0
        except SspError as error:
            complain(str(error))
            return error.exit_code
        if message:
            print(visible(message))
    return 0
