"""Starts processes that the stub device is preloaded into."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of
from tests.stub_gpu.build import CudaPython


@dataclass(frozen=True)
class Stub:
    """The stub device, built for an interpreter.

    Attributes:
        folder: with the two libraries and the caches of torch's compilers.
    """

    python: CudaPython
    folder: Path

    def environment(self, **settings: object) -> dict[str, str]:
        """The environment of a process on the stub device; `settings` add variables (README.md lists the stub's)."""
        library_path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        return {
            **os.environ,
            "LD_PRELOAD": str(self.folder / "libstubgpu.so"),
            "LD_LIBRARY_PATH": library_path,
            "TRITON_LIBCUDA_PATH": str(self.folder),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **{name: str(value) for name, value in settings.items()},
        }

    def start(self, *arguments: object, output: Path, **settings: object) -> subprocess.Popen[str]:
        """Start a process that leads a process group of its own (see `end`); its output goes to a file."""
        with output.open("w") as sink:
            return subprocess.Popen(
                [str(self.python.path), *map(str, arguments)], cwd=ROOT, env=self.environment(**settings), text=True,
                stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that `Stub.start` started, and its children, the lowest first."""
    for pid in reversed(family_of(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
