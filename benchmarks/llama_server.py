"""llama.cpp's server over files of `benchmarks.llama_cpp`, for `llama-ssp audit`: `python -m benchmarks.llama_server`.

It runs in an interpreter with the package xllamacpp, whose wheels have that server. Matrices and cache are in fp32.
"""

import argparse
import time


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--probabilistic", action="store_true", help="drafts are drawn, not the best tokens")
    parser.add_argument("--port", type=int, default=8002)
    arguments = parser.parse_args()
    import xllamacpp  # type: ignore[import-not-found]  # noqa: PLC0415 - it is in that interpreter alone

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_parallel = arguments.target, arguments.port, 4
    params.n_ctx, params.n_gpu_layers = 4 * 2048, 0
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if arguments.draft:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = arguments.draft, 4, 0, 0.0
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
        draft.probabilistic = arguments.probabilistic
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(params)
    print(f"llama.cpp {xllamacpp.BUILD_INFO} at {server.listening_address}/v1", flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
