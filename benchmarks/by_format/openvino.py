"""OpenVINO GenAI, whose own pipelines decode; optimum-intel converts the models.

Forms are `fp32`, `bf16` (weights and arithmetic), `int8` and `int4` (weights; the arithmetic is OpenVINO's choice).
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.by_format.serving import Completed, serve

_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
_BITS = {"int8": 8, "int4": 4}


class OpenVino:
    """See `Library`."""

    def __init__(self) -> None:
        self._library = import_module("openvino_genai")
        self._pipelines: dict[tuple[str, bool], Any] = {}

    def load(self, *, form: str, folders: Sequence[str], converted: str, num_threads: int) -> str:
        """See `Library`."""
        made = [_converted(Path(folder), Path(converted), form) for folder in folders]
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads}
        if precision := _PRECISIONS.get(form):
            settings["INFERENCE_PRECISION_HINT"] = precision
        library = self._library
        self._pipelines[form, False] = library.LLMPipeline(made[0], "CPU", **settings)
        if len(made) > 1:
            scheduler = library.SchedulerConfig()
            # With it, the second completion of a prompt fails: `content_length <= prompt_ids.size() + ...`.
            scheduler.enable_prefix_caching = False
            draft = library.draft_model(made[1], "CPU", **settings)
            self._pipelines[form, True] = library.LLMPipeline(
                made[0], "CPU", draft_model=draft, scheduler_config=scheduler, **settings
            )
        return ", ".join(f"{name} {version(name)}" for name in ("openvino-genai", "optimum-intel", "nncf"))

    def complete(
        self, prompt_ids: Sequence[int], *, form: str, num_new_tokens: int, num_draft_tokens: int | None,
        temperature: float, seed: int,
    ) -> Completed:  # fmt: skip
        """See `Library`."""
        numpy, openvino = import_module("numpy"), import_module("openvino")
        settings = self._library.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.rng_seed = num_new_tokens, True, seed
        settings.do_sample, settings.temperature = True, temperature
        if num_draft_tokens is not None:
            settings.num_assistant_tokens = num_draft_tokens
        ids = numpy.array([prompt_ids], dtype=numpy.int64)
        inputs = self._library.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        found = self._pipelines[form, num_draft_tokens is not None].generate(inputs, settings)
        num_tokens = len(found.tokens[0])
        num_rounds = num_tokens - 1
        if num_draft_tokens is not None:
            num_rounds = len(found.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations) - 1
        return Completed(num_tokens=num_tokens, num_rounds=num_rounds)


def _converted(folder: Path, below: Path, form: str) -> Path:
    """The folder of a checkpoint in OpenVINO's format, made if it is not there."""
    made = below / f"{folder.name}-openvino-{form}"
    if not made.exists():
        optimum, openvino, torch = (import_module(name) for name in ("optimum.intel", "openvino", "torch"))
        tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(folder)
        model = optimum.OVModelForCausalLM.from_pretrained(
            folder, export=True, compile=False, load_in_8bit=False,
            dtype=torch.bfloat16 if form == "bf16" else torch.float32,
            quantization_config=optimum.OVWeightQuantizationConfig(bits=_BITS[form]) if form in _BITS else None,
        )  # fmt: skip
        unfinished = made.with_name(f"{made.name}-unfinished")
        model.save_pretrained(unfinished)
        parts = import_module("openvino_tokenizers").convert_tokenizer(tokenizer, with_detokenizer=True)
        for part, name in zip(parts, ("tokenizer", "detokenizer"), strict=True):
            openvino.save_model(part, unfinished / f"openvino_{name}.xml")
        unfinished.rename(made)
    return made


if __name__ == "__main__":
    serve(OpenVino())
