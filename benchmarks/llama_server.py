"""llama.cpp's own server over files of `benchmarks.llama_cpp`, of the package xllamacpp, whose wheels have it.

    python -m benchmarks.llama_server TARGET.gguf --draft DRAFT.gguf --port 8002

Runs in an interpreter that has that package, which LLAMA_SSP_LLAMA_PYTHON names, until its input ends or Ctrl-C.
Matrices are as the files have them.
"""

import argparse
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Any

PYTHON = os.environ.get("LLAMA_SSP_LLAMA_PYTHON")
"""The interpreter; none if llama.cpp's server takes no part."""


def main() -> None:
    """Serve a file that `benchmarks.llama_cpp.write` has made with a vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--probabilistic", action="store_true", help="drafts are drawn, not the best tokens")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--rows", type=int, default=4, help="requests at the same time")
    parser.add_argument("--slots", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", choices=("f32", "f16"), default="f32", help="the number format of the cache")
    given = parser.parse_args()
    library: Any = import_module("xllamacpp")
    params, cache = library.CommonParams(), library.ggml_type[f"GGML_TYPE_{given.cache.upper()}"]
    params.model.path, params.port, params.n_parallel = given.target, given.port, given.rows
    params.n_ctx, params.n_gpu_layers = given.rows * given.slots, 0
    params.cache_type_k = params.cache_type_v = cache
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.threads
    if given.draft:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = given.draft, 4, 0, 0.0
        draft.cache_type_k = draft.cache_type_v = cache
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = given.threads
        draft.probabilistic = given.probabilistic
        params.speculative.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = library.Server(params)
    print(
        f"llama.cpp of xllamacpp {version('xllamacpp')} at {server.listening_address}/v1", file=sys.stderr, flush=True
    )
    sys.stdin.read()


if __name__ == "__main__":
    main()
