"""Detects that the reader of a stream is gone: it closed the pipe, or the terminal hung up.

A closed pipe ends a run (`terminal`). A terminal that hangs up does not; SIGHUP ends the runs that must end with it.
"""

import errno
import os
import sys
import termios
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from llama_ssp.words import visible

_USUAL_COLUMNS = 80


@contextmanager
def until_unread(stream: IO[str] | None) -> Iterator[None]:
    """End the block silently when the reader of a stream is gone: after `| head`, or a terminal that hung up."""
    try:
        yield
        if stream is not None:  # it may have been closed before
            stream.flush()
    except OSError as error:
        is_closed = isinstance(error, BrokenPipeError)
        if stream is None or not (is_closed or (error.errno == errno.EIO and has_hung_up(stream))):
            raise
        silence(stream)


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
    """Write a sentence to standard error, unless its reader is gone: on a terminal wrapped between words."""
    lines = visible(sentence).split("\n")
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
        lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]
    with until_unread(sys.stderr):
        sys.stderr.write("\n".join([*lines, ""]))
