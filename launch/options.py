"""Command lines of programs that take folders, settings and options, read by argparse and answered in our words.

What `launch/run.py` takes is Hydra's business and that of `command_line`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from llama_ssp.console.unread import is_unread, silence
from llama_ssp.errors import ConfigError, SspError
from llama_ssp.visible import visible


class Options(argparse.ArgumentParser):
    """A parser whose help is the text of the program, and whose complaints are one sentence.

    Args:
        usage: how the program is called.
        text: what it does, with examples.
    """

    def __init__(self, usage: str, text: str | None) -> None:
        super().__init__(
            usage=usage,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Complain.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}: it is called as {self.usage}, and --help says more")


@contextmanager
def until_unread() -> Iterator[None]:
    """End the block, without a complaint, when nobody reads standard output any more, as behind `| head`.

    The same holds for a terminal that has hung up.
    """
    try:
        yield
        if sys.stdout:  # it may have been closed before
            sys.stdout.flush()
    except OSError as error:
        if not is_unread(sys.stdout, error):
            raise
        silence(sys.stdout)


def complain(sentence: str) -> None:
    """Write a line to standard error, if anybody reads it; control characters of what it quotes become visible."""
    try:
        sys.stderr.write(f"{visible(sentence)}\n")
        sys.stderr.flush()
    except OSError as error:
        if not is_unread(sys.stderr, error):
            raise
        silence(sys.stderr)


def run(parser: Options, arguments: Sequence[str], act: Callable[[argparse.Namespace], str | None]) -> int:
    """Read the arguments and act on them.

    Args:
        parser: knows them.
        arguments: without the name of the program.
        act: what the program does; returns what it has to say at the end.

    Returns:
        The exit code: 0, or that of the mistake, which standard error has as a sentence.
    """
    with until_unread():
        try:
            said = act(parser.parse_intermixed_args(arguments))
        except SystemExit:  # help was asked for and given
            return 0
        except SspError as error:
            complain(str(error))
            return error.exit_code
        if said:
            print(visible(said))
    return 0
