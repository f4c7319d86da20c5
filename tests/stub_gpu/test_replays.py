"""Replays read what Python would read: every drafter, kind of target and way of decoding."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.gpu_faults import steps
from tests.stub_gpu.build import Stub, end
from tests.stub_gpu.replay_settings import KINDS, Kind

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.gpu_stub
_AT_MOST_S = 600


class Imported:
    """A process on the stub device that has imported everything, and forks for each kind; a new one if it was lost."""

    def __init__(self, stub: Stub, folder: Path) -> None:
        self._stub, self._said = stub, folder / "said"
        self._process: subprocess.Popen[str] | None = None

    def decode(self, jobs: list[dict[str, Any]]) -> list[int]:
        """Run jobs of one kind at once, one for each rank; returns their exit codes."""
        if self._process is None:
            self._ours, theirs = socket.socketpair()
            with theirs:
                self._process = self._stub.start(
                    "-m", "tests.stub_gpu.replays", output=self._said, stdin=theirs.fileno()
                )
        try:
            self._ours.sendall(f"{json.dumps(jobs)}\n".encode())
            self._ours.settimeout(_AT_MOST_S)
            answer = self._ours.recv(1000)
            assert answer, self._said.read_text()[-5000:]
        except BaseException:
            self.end()
            raise
        codes: list[int] = json.loads(answer)
        return codes

    def end(self) -> None:
        """End the process and its forks."""
        if self._process is not None:
            self._ours.close()
            end(self._process)
        self._process = None


@pytest.fixture(scope="module")
def imported(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    process = Imported(stub, tmp_path_factory.mktemp("imported"))
    yield process
    process.end()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_replays_read_what_python_would_read_and_wait_for_nothing(
    imported: Imported, kind: Kind, tmp_path: Path
) -> None:
    out, settings = tmp_path / "left.json", steps() if kind.num_ranks > 1 else [{}]
    jobs: list[dict[str, Any]] = [
        {
            "kind": kind.name,
            "out": str(out),
            "output": str(tmp_path / str(rank)),
            "settings": {**step, "STUB_GPU_COUNT": str(kind.num_ranks)},
        }
        for rank, step in enumerate(settings)
    ]
    codes = imported.decode(jobs)
    assert codes == [0] * kind.num_ranks, [Path(job["output"]).read_text()[-5000:] for job in jobs]
    assert json.loads(out.read_text()) == {way.name: [] for way in kind.ways}
