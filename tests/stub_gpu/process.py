"""Starts processes that the stub device is preloaded into."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.repository import ROOT
from tests.stub_gpu.build import CudaPython, find_python, folder_for


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
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in settings.items()},
        }

    def command(self, *arguments: object, ranks: int = 0) -> list[str]:
        """A command line for the interpreter; with `ranks`, under torchrun."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        return [str(self.python.path), *torchrun, *map(str, arguments)]

    def start(
        self, *arguments: object, ranks: int = 0, output: Path | None = None, **settings: object
    ) -> subprocess.Popen[str]:
        """Start a process, and return at once; with `ranks` under torchrun, each rank with a device of its own.

        It leads a process group of its own (see `end`). Its output goes to a file, or to a pipe.
        """
        if ranks:
            settings = {"STUB_GPU_COUNT": ranks, **settings}
        sink = output.open("w") if output else None
        try:
            return subprocess.Popen(
                self.command(*arguments, ranks=ranks), cwd=ROOT, env=self.environment(**settings), text=True,
                stdout=sink or subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        finally:
            if sink:
                sink.close()

    def run(self, *arguments: object, ranks: int = 0, timeout_s: float = 300, **settings: object) -> str:
        """Run a process to its end; returns its output, or raises AssertionError with it if it failed."""
        process = self.start(*arguments, ranks=ranks, output=None, **settings)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end(process)
            output, _ = process.communicate()
            raise AssertionError(f"still running after {timeout_s:g} s: {output}") from None
        assert process.returncode == 0, f"exit code {process.returncode}: {output}"
        return output


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that `Stub.start` started, and its children: torchrun's ranks lead sessions of their own."""
    for pid in [*_children(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _children(pid: int) -> list[int]:
    """The processes below one, the lowest first."""
    found: list[int] = []
    for tasks in Path("/proc", str(pid), "task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found += [*_children(child), child]
    return found


def find_stub() -> Stub | str:
    """The stub device, or why it cannot be used here."""
    python = find_python()
    return python if isinstance(python, str) else Stub(python, folder_for(python))
