"""Whether anybody can still read a stream: the other end of a pipe may be closed, and a terminal may hang up.

A closed pipe ends a run (`terminal`). A terminal that hangs up does not: SIGHUP ends the runs that are to end with it.
"""

import errno
import os
import termios
from contextlib import suppress
from typing import IO


def is_unread(stream: IO[str], error: OSError) -> bool:
    """Say whether a write failed because nobody can read the stream any more.

    Args:
        stream: that was written.
        error: what the write raised.
    """
    return isinstance(error, BrokenPipeError) or (error.errno == errno.EIO and has_hung_up(stream))


def has_hung_up(stream: IO[str]) -> bool:
    """Say whether a stream leads to a terminal that has hung up."""
    try:
        termios.tcgetattr(stream.fileno())
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)  # a file or a pipe gives ENOTTY
    except (OSError, ValueError):  # a stream of Python's own, or closed
        return False
    return False


def silence(stream: IO[str]) -> None:
    """Discard what is still in the buffer of a stream, and all that follows."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
