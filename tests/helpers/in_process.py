"""Runs the entry of a rank inside this process, hundreds of times in a minute, and tells how each run ended."""

import contextlib
import io
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from unittest import mock

from llama_ssp.ranks.signals import STOP_SIGNALS
from llama_ssp.run.commands import run


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code; None after an error that nobody had foreseen.
        err: what it said on standard error, or the traceback of that error.
        out: what it wrote to standard output; empty after an error that nobody had foreseen.
    """

    code: int | None
    err: str
    out: str = ""


def launch(*arguments: str) -> Ended:
    """Run `launch/run.py` with these arguments, on one rank, as python would start it."""
    said, written = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with (
            mock.patch.object(sys, "argv", ["run.py", *arguments]),
            contextlib.redirect_stdout(written),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # of libraries: a run shows them and goes on
            return Ended(code=run.main(), err=said.getvalue(), out=written.getvalue())
    except Exception:  # noqa: BLE001 - whatever gets out is what the caller looks for
        return Ended(code=None, err=traceback.format_exc())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
