"""The options of a command, and how it ends."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from llama_ssp.errors import ConfigError, SspError
from llama_ssp.terminal.unread import complain, until_unread
from llama_ssp.text.messages import visible


class Options(argparse.ArgumentParser):
    """A parser called as `usage`, whose help is `text`, and whose errors are one sentence that ends with a hint."""

    def __init__(self, usage: str, text: str | None, *, hint: str | None = None) -> None:
        super().__init__(
            usage=usage,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=hint is None,
        )
        self._hint = hint or f"; usage: {usage}; --help explains it"

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and the hint."""
        raise ConfigError(message + self._hint)


def act_on(parser: Options, arguments: Sequence[str], act: Callable[[argparse.Namespace], str | None]) -> int:
    """Read the arguments, act on them, print the closing message that `act` returns, and return the exit code."""
    with until_unread(sys.stdout):
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
