"""Runs on a terminal of their own, which can hang up."""

import os
import pty
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.helpers.disturbed import wait_for
from tests.helpers.repository import ROOT


class OnTerminal:
    """A command that leads the session of a terminal, as a shell does; a context manager that kills it at the end.

    Args:
        words: of the command.
        num_columns: width of the terminal; by default unknown.
        more: its environment, if it is not that of this process.

    Attributes:
        process: of the command.
        shown: what the terminal has shown until the last `read`.
    """

    def __init__(
        self, words: Sequence[str], *, num_columns: int | None = None, more: Mapping[str, str] | None = None
    ) -> None:
        self._end: int | None
        self._end, theirs = pty.openpty()
        if num_columns:
            termios.tcsetwinsize(theirs, (40, num_columns))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *words], cwd=ROOT, env=more, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        os.set_blocking(self._end, False)
        self._bytes = b""

    @property
    def shown(self) -> str:
        return self._bytes.decode(errors="replace").replace("\r", "")

    def read(self) -> None:
        """Take what the terminal shows, which would have no room for more after some pages."""
        with suppress(OSError):  # there is nothing, or nobody is left to write
            while self._end is not None and (some := os.read(self._end, 65536)):
                self._bytes += some

    def enter(self, text: str) -> None:
        """Enter a text, such as Ctrl-C, which is one character."""
        assert self._end is not None
        os.write(self._end, text.encode())

    def wait_for(self, condition: Callable[[], object], *, at_most_s: float) -> None:
        def is_true() -> object:
            self.read()
            return condition()

        wait_for(is_true, at_most_s=at_most_s)

    def hang_up(self) -> None:
        """Close the terminal: its session receives SIGHUP, and nothing can be read or written any more."""
        if self._end is not None:
            os.close(self._end)
            self._end = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()
