"""llama.cpp through the package llama-cpp-python: forwards and draws of its library, in our own lean loop.

Forms are `F32`, `F16`, `BF16`, `Q8_0` and `Q4_0`.
"""

import ctypes
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.by_format import lean_loop
from benchmarks.by_format.gguf_files import write
from benchmarks.by_format.serving import Completed, serve

_MOST_TOKENS = 512
_CONTEXT = 1024


class Model:
    """One model with a cache and a sampler."""

    def __init__(self, library: Any, file: Path, *, num_threads: int) -> None:  # noqa: ANN401 - comes without types
        self._library = library
        self._model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch = _CONTEXT, _MOST_TOKENS
        settings.n_threads = settings.n_threads_batch = num_threads
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp does not read {file}")
        self._memory = library.llama_get_memory(self._context)
        self._batch = library.llama_batch_init(_MOST_TOKENS, 0, 1)
        vocabulary = library.llama_model_get_vocab(self._model)
        self._logits = ctypes.c_float * library.llama_vocab_n_tokens(vocabulary)
        self._sampler: Any = None

    def set_sampler(self, *, temperature: float, seed: int) -> None:
        """What `draw` draws with, until the next one."""
        library = self._library
        if self._sampler:
            library.llama_sampler_free(self._sampler)
        self._temperature = temperature
        self._sampler = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for step in (library.llama_sampler_init_temp(temperature), library.llama_sampler_init_dist(seed)):
            library.llama_sampler_chain_add(self._sampler, step)

    def decode(self, tokens: Sequence[int], *, first: int, all_scored: bool = False) -> None:
        """See `Decodes`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token
            batch.pos[place] = first + place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = all_scored or place == len(tokens) - 1
        if failed := self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")

    def draw(self) -> int:
        """See `Decodes`."""
        return int(self._library.llama_sampler_sample(self._sampler, self._context, -1))

    def probabilities(self, place: int = -1) -> lean_loop.Probabilities:
        """See `Decodes`."""
        address = ctypes.cast(self._library.llama_get_logits_ith(self._context, place), ctypes.c_void_p).value
        logits = np.frombuffer(self._logits.from_address(address), dtype=np.float32)
        weights = np.exp((logits - logits.max()) / np.float32(self._temperature))
        probabilities: lean_loop.Probabilities = weights / weights.sum()
        return probabilities

    def forget(self, *, first: int) -> None:
        """See `Decodes`."""
        self._library.llama_memory_seq_rm(self._memory, 0, first, -1)


class LlamaCpp:
    """See `Library`."""

    def __init__(self) -> None:
        self._library = import_module("llama_cpp")
        self._models: dict[str, list[Model]] = {}
        # It tells about every tensor that it loads; the function must live as long as the library.
        self._silent = self._library.llama_log_callback(lambda *_: None)
        self._library.llama_log_set(self._silent, ctypes.c_void_p(0))

    def load(self, *, form: str, folders: Sequence[str], converted: str, num_threads: int) -> str:
        """See `Library`."""
        models = []
        for folder in map(Path, folders):
            file = Path(converted) / f"{folder.name}-{form}.gguf"
            if not file.exists():
                write(folder, file, form)
            models.append(Model(self._library, file, num_threads=num_threads))
        self._models[form] = models
        return f"llama-cpp-python {self._library.__version__}, gguf {_version('gguf')}"

    def complete(
        self, prompt_ids: Sequence[int], *, form: str, num_new_tokens: int, num_draft_tokens: int | None,
        temperature: float, seed: int,
    ) -> Completed:  # fmt: skip
        """See `Library`."""
        target, *drafts = self._models[form]
        for model in (target, *drafts):
            model.set_sampler(temperature=temperature, seed=seed)
        if num_draft_tokens is None:
            tokens, num_rounds = lean_loop.plain(target, prompt_ids, num_new_tokens=num_new_tokens)
        else:
            tokens, num_rounds = lean_loop.speculative(
                target, drafts[0], prompt_ids, num_new_tokens=num_new_tokens, num_draft_tokens=num_draft_tokens,
                draws=np.random.default_rng(seed),
            )  # fmt: skip
        return Completed(num_tokens=len(tokens), num_rounds=num_rounds)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


if __name__ == "__main__":
    serve(LlamaCpp())
