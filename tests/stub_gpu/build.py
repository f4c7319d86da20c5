"""Finds an interpreter whose torch is a CUDA build, builds the stub device for it from `cuda/`, and starts processes.

What is built lies in a folder of the temporary directory that is named after the sources, together with what torch's
compilers keep for later runs, so only the first run after a change pays for it.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.helpers.repository import ROOT
from tests.helpers.sockets import family_of

INTERPRETER = "LLAMA_SSP_CUDA_PYTHON"
"""The variable that names the interpreter; without it, the one that runs the tests."""
SOURCES = Path(__file__).parent / "cuda"
DRIVER = ("driver.cpp", "unsupported.cpp")
"""The sources of libcuda.so.1; all others are of the library that is preloaded."""
COMPILE = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra")
_ASK = """
import importlib.util, json, pathlib, runpy
spec = importlib.util.find_spec("torch")
folder = pathlib.Path(spec.origin).parent if spec and spec.origin else None
version = runpy.run_path(str(folder / "version.py")) if folder else {}
print(json.dumps({"torch": str(folder), "version": str(version.get("__version__")), "cuda": version.get("cuda")}))
"""


@dataclass(frozen=True)
class Stub:
    """The stub device, built for an interpreter.

    Attributes:
        python: the interpreter, whose torch is a CUDA build.
        folder: with the two libraries and the caches of torch's compilers.
    """

    python: Path
    folder: Path

    def start(
        self, *arguments: object, output: Path, stdin: int | None = None, **settings: object
    ) -> subprocess.Popen[str]:
        """Start a process that leads a process group of its own (see `end`); its output goes to a file.

        `settings` are variables of its environment; README.md lists the stub's.
        """
        library_path = os.pathsep.join([str(self.folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        environment = {
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
        with output.open("w") as sink:
            return subprocess.Popen(
                [str(self.python), *map(str, arguments)],
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=stdin,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@cache
def find_stub() -> Stub | str:
    """The stub device, or why it cannot be used here."""
    path = os.environ.get(INTERPRETER, sys.executable)
    if not shutil.which("g++"):
        return "the stub device is built by g++, which is not installed"
    try:
        told = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{INTERPRETER}={path} is no Python interpreter that works: {error}"
    facts = json.loads(told)
    if not facts["cuda"]:
        return f"{INTERPRETER} names no interpreter with a CUDA build of torch; {path} has torch {facts['version']}"
    packages = Path(facts["torch"]).parent
    includes = _includes(packages)
    if includes is None:
        return f"the wheels in {packages} bring no headers of CUDA, cuBLAS and NCCL"
    return Stub(Path(path), _folder_for(facts["version"], includes))


def _includes(packages: Path) -> tuple[Path, ...] | None:
    """In the order of search; Triton's headers of CUDA have what NVIDIA's wheels lack."""
    found = []
    for header in ("cuda_runtime_api.h", "cublas_v2.h", "nccl.h"):
        folders = sorted(path.parent for path in packages.glob(f"nvidia/**/{header}"))
        if not folders:
            return None
        found.append(folders[-1])
    triton = packages / "triton" / "backends" / "nvidia" / "include"
    return tuple(dict.fromkeys([SOURCES / "instead", *found, *([triton] if triton.is_dir() else [])]))


def _folder_for(torch_version: str, includes: tuple[Path, ...]) -> Path:
    """The folder with both libraries, built first if need be; `includes` are folders with headers of CUDA."""
    sources = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("**/*.h*")])
    parts = [torch_version.encode(), repr((includes, COMPILE)).encode()]
    digest = hashlib.sha256(b"".join(parts + [source.read_bytes() for source in sources])).hexdigest()[:16]
    everything = Path(tempfile.gettempdir()) / f"llama-ssp-stub-gpu-{os.getuid()}"
    everything.mkdir(mode=0o700, exist_ok=True)
    folder = everything / digest
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=everything) as workshop:
            made = Path(workshop) / "made"
            made.mkdir()
            _build([path for path in sources if path.suffix == ".cpp"], includes, made, Path(workshop))
            if not folder.exists():  # another process may have been faster
                made.rename(folder)
    return folder


def _build(sources: list[Path], includes: tuple[Path, ...], made: Path, workshop: Path) -> None:
    headers = [part for folder in includes for part in ("-isystem", str(folder))]

    def compiled(source: Path) -> str:
        target = str(workshop / f"{source.stem}.o")
        _run(["g++", *COMPILE, *headers, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = dict(zip([source.name for source in sources], pool.map(compiled, sources), strict=True))
    driver = [objects.pop(name) for name in DRIVER]
    link = ["g++", "-shared", "-Wl,-soname,{}", "-o"]
    for name, parts in (("libstubgpu.so", [*objects.values()]), ("libcuda.so.1", driver)):
        _run([word.format(name) for word in link] + [str(made / name), *parts, "-ldl", "-lpthread"])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr.strip():
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that `Stub.start` started, and its children, the lowest first."""
    for pid in reversed(family_of(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
