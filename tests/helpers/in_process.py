"""Runs the entry of a rank inside this process, hundreds of times in a minute, and tells how each run ended."""

import contextlib
import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

from llama_ssp.ranks.process import signals_kept
from llama_ssp.run.commands import plan, run
from tests.helpers.disturbed import lines


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code; None after an error that nobody had foreseen.
        err: what it said on standard error, or the traceback of that error.
        out: what it wrote to standard output; empty after an error that nobody had foreseen.
        run_dir: its run folder, if the arguments name one.
    """

    code: int | None
    err: str
    out: str = ""
    run_dir: Path = field(default=Path(), compare=False)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return lines(self.run_dir)

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    @property
    def status(self) -> str:
        return (self.run_dir / "status").read_text()

    def well(self) -> Self:
        """This run, which must have ended well."""
        assert self.code == 0, self.err
        return self

    def check_refusal(self, *parts: str, code: int = 2) -> None:
        """Assert that this run ended with a code and one sentence, which has these parts."""
        assert (self.code, self.err.count("\n")) == (code, 1), self.err
        assert [part for part in parts if part not in self.err] == [], self.err


def call(main: Callable[[list[str]], int], arguments: list[str]) -> Ended:
    """Call a command's main function, as its file does."""
    said, written = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(said):
            return Ended(code=main(arguments), err=said.getvalue(), out=written.getvalue())
    except Exception:  # noqa: BLE001 - whatever gets out is what the caller looks for
        return Ended(code=None, err=traceback.format_exc())
    except SystemExit as stop:
        code = 0 if stop.code is None else stop.code
        return Ended(code=code if isinstance(code, int) else None, err=said.getvalue(), out=written.getvalue())


def planned(*settings: str) -> dict[str, Any]:
    """The document of a plan that fits, or of a search or a comparison of machines."""
    content: dict[str, Any] = json.loads(call(plan.main, [*settings, "format=json"]).well().out)
    return content


def launch(*arguments: str) -> Ended:
    """Run `launch/run.py` with these arguments, on one rank, as python would start it."""
    run_dir = Path(next((word[8:] for word in reversed(arguments) if word.startswith("run_dir=")), ""))
    with mock.patch.object(sys, "argv", ["run.py", *arguments]), warnings.catch_warnings(), signals_kept():
        warnings.simplefilter("ignore")  # of libraries: a run shows them and goes on
        return replace(call(lambda _: run.main(), []), run_dir=run_dir)
