"""A library in a process of its own: our side of `serving`."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.by_format.serving import PAUSE_S, Completed

ROOT = Path(__file__).resolve().parents[2]
_LAST_LINES = 5


class LibraryProcess:
    """A process that serves a library, as a context manager.

    Args:
        python: the interpreter that can import the library.
        module: its adapter.
        num_threads: of OpenMP in that process.

    Attributes:
        idle_s: time between requests.
        idle_cpu_s: processor time that the process took in it.
    """

    def __init__(self, python: Path, module: str, *, num_threads: int) -> None:
        self.idle_s = self.idle_cpu_s = 0.0
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [python, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()
        self._log.close()

    def load(self, **request: object) -> str:
        """See `Library.load`."""
        return str(self._ask(call="load", **request))

    def complete(self, prompts: Sequence[Sequence[int]], **request: object) -> tuple[float, list[Completed]]:
        """Complete prompts one by one (see `Library.complete`); returns the seconds of all, by the library's clock."""
        time.sleep(PAUSE_S)  # until our own threads sleep
        found = self._ask(call="complete", prompts=[list(ids) for ids in prompts], **request)
        return found["seconds"], [Completed(**each) for each in found["completed"]]

    def _ask(self, **request: object) -> Any:  # noqa: ANN401 - what the other side has answered
        """Send a request and wait; RuntimeError with the library's words if it failed."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked
        assert answers
        try:
            asked.write(json.dumps(request) + "\n")
            asked.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            last = " | ".join(self._log.read().splitlines()[-_LAST_LINES:])
            raise RuntimeError(f"{self._process.args!r} has ended: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._process.args!r}: {answer['error']}")
        self.idle_s += answer["idle_s"]
        self.idle_cpu_s += answer["idle_cpu_s"]
        return answer["result"]
