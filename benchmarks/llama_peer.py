"""llama.cpp's own server, of the package xllamacpp.

    python -m benchmarks.llama_peer FILE PORT ROWS SLOTS THREADS

Runs in an interpreter that has that package, which LLAMA_SSP_LLAMA_PYTHON names, until its input ends.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

PYTHON = os.environ.get("LLAMA_SSP_LLAMA_PYTHON")
"""The interpreter; none if llama.cpp's server takes no part."""


def main() -> None:
    """Serve a file that `benchmarks.llama_cpp.write` has made with a vocabulary, for so many rows of so many slots."""
    library: Any = import_module("xllamacpp")
    file, *numbers = sys.argv[1:]
    port, num_rows, num_slots, num_threads = map(int, numbers)
    settings = library.CommonParams()
    settings.model.path, settings.port = file, port
    settings.n_parallel, settings.n_ctx = num_rows, num_rows * num_slots
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = num_threads
    server = library.Server(settings)
    print(f"llama.cpp of xllamacpp {version('xllamacpp')} at {server.listening_address}", file=sys.stderr, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
