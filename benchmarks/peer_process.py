"""A peer in a process of its own, which answers lines of JSON: both sides.

The first answer has its version. Then each line asks for a completion; its answer has seconds and rounds. What
libraries print goes to stderr. Imports no package, since a peer may live in another interpreter.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Complete = Callable[..., int | None]
"""Makes a completion; returns its rounds after the first token, or None for a round a token."""
_END_S = 10.0


class PeerError(Exception):
    """A peer failed, ended, or gave no answer in time."""


class PeerProcess:
    """The side that asks: `command` runs in the repository's root; `log` gets its stderr, or ours does."""

    def __init__(self, command: Sequence[str], *, log: Path | None = None, **environment: str) -> None:
        self._log, self._reason = log or Path(os.devnull), ""
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                env=os.environ | environment,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink if log else None,
                start_new_session=True,
            )

    def ask(self, **request: object) -> None:
        """Send a request; answers come in the order of the requests."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # `answer` says that the peer has ended
            self._process.stdin.write(f"{json.dumps(request)}\n".encode())

    def answer(self, limit_s: float = 3600.0) -> dict[str, Any]:
        """The next answer; PeerError with the reason if the peer fails, or has none in time, which ends it."""
        assert self._process.stdout
        if not self._reason and not select.select([self._process.stdout], [], [], limit_s)[0]:
            self._reason = f"no answer within {limit_s:g} s"
            self.close()
        if not self._reason and not (line := self._process.stdout.readline()):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            words = [word for word in self._log.read_text(errors="replace").splitlines() if word.strip()]
            self._reason = f"ended with code {self._process.poll()}: {''.join(words[-1:])}"
        if self._reason:
            raise PeerError(self._reason)
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PeerError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may keep it for ever
            self._process.communicate(timeout=_END_S)


def serve(start: Callable[[], tuple[str, Complete]]) -> None:
    """The side that answers: starts a peer of a version, then completes."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        version, complete = start()
        print(json.dumps({"version": version}), file=answers, flush=True)
        for line in sys.stdin:
            started, answer = time.perf_counter(), dict[str, object]()
            try:
                answer |= {"rounds": complete(**json.loads(line)), "s": time.perf_counter() - started}
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason of a line
                traceback.print_exc()
                said = str(error).strip().partition("\n")[0]
                answer["failed"] = f"{type(error).__name__}: {said}"
            print(json.dumps(answer), file=answers, flush=True)
