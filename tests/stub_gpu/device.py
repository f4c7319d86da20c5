"""The stub device as seen by a process that it was preloaded into: its log, and the graphs that it has captured."""

import ctypes
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Record(NamedTuple):
    """A launch, a wait, or another event.

    Attributes:
        kind: kernel, triton, gemm, nccl, copy, memset, replay, captured, wait, poll, ...; a fault is what a program
            should not have done.
        text: what follows the kind: sizes and names.
    """

    kind: str
    text: str


def reset() -> None:
    _library().stub_reset()


def log() -> list[Record]:
    return _written(lambda path: int(_library().stub_write_log(path)))


def graph(number: int) -> list[Record]:
    """The nodes of a graph, by the number in its records `captured` and `replay`."""
    return _written(lambda path: int(_library().stub_write_graph(number, path)))


def _written(write: Callable[[bytes], int]) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        if write(str(path).encode()) < 0:
            raise RuntimeError("the stub device has no such records")
        lines = path.read_text().splitlines()
    return [Record(kind, text) for kind, _, text in (line.partition(" ") for line in lines)]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for name in ("stub_write_log", "stub_write_graph"):
        getattr(library, name).restype = ctypes.c_long
    library.stub_write_graph.argtypes = [ctypes.c_long, ctypes.c_char_p]
    return library
