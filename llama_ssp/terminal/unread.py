"""Detects that the reader of a stream is gone: it closed the pipe, or the terminal hung up; or there never was one.

A closed pipe ends a run (`terminal`). A terminal that hangs up does not; SIGHUP ends the runs that must end with it. A
stream that was closed before the start (`2>&-`) is the null device.
"""

import errno
import os
import sys
import termios
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from llama_ssp.text.messages import visible

_USUAL_COLUMNS = 80


def open_closed() -> None:
    """Open the null device for each standard stream that this process was started without.

    The next file of the process would have the number of the stream, and get what libraries write to that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free: this stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


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
    """Write a sentence to standard error, unless it is closed or its reader is gone: on a terminal wrapped."""
    if sys.stderr is None or sys.stderr.closed:
        return
    lines = visible(sentence).split("\n")
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
        lines = [textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in lines]
    with until_unread(sys.stderr):
        sys.stderr.write("\n".join([*lines, ""]))
