"""Detects that nobody can read a stream any more: the reader closed the pipe, or the terminal hung up.

A closed pipe ends a run (`terminal`). A terminal that hangs up does not; SIGHUP ends the runs that must end with it.
"""

import errno
import os
import sys
import termios
from contextlib import suppress
from typing import IO

from llama_ssp.words import visible


def is_unread(stream: IO[str], error: OSError) -> bool:
    """Whether a write to `stream` raised `error` because nobody can read the stream any more."""
    return isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and has_hung_up(stream))


def has_hung_up(stream: IO[str]) -> bool:
    """Whether a stream leads to a terminal that has hung up."""
    try:
        termios.tcgetattr(stream.fileno())
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)  # a file or a pipe gives ENOTTY
    except (OSError, ValueError):  # a stream without a descriptor, or a closed one
        pass
    return False


def silence(stream: IO[str]) -> None:
    """Discard the buffer of a stream, and everything written to it from now on."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def complain(sentence: str) -> None:
    """Write a line to standard error, if anybody reads it, with its control characters made visible."""
    try:
        sys.stderr.write(f"{visible(sentence)}\n")
        sys.stderr.flush()
    except OSError as error:
        if not is_unread(sys.stderr, error):
            raise
        silence(sys.stderr)
