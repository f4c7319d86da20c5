"""Reads what lm-evaluation-harness hands over: the arguments of a model, and those of each request to generate."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from llama_ssp.api.arguments import check_types
from llama_ssp.catalogue import ModelConfig
from llama_ssp.errors import refuse, unknown_name
from llama_ssp.run.tasks.records import GenerateConfig
from llama_ssp.settings.checks import check_values
from llama_ssp.settings.rules import DEFAULT
from llama_ssp.settings.schema import DrafterConfig, RunConfig, SamplingConfig, SpeculationConfig, VerificationConfig

_NEEDS_IDS = {"bad_ids", "eos_ids", "bad_words", "logit_bias", "min_new_tokens"}
_SAMPLING = {entry.name for entry in fields(SamplingConfig)} - {"from_model"} - _NEEDS_IDS
_OTHER = {"do_sample", "until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}
_WITHOUT_EFFECT = {
    "top_k": (0, -1), "top_p": (0, -1), "min_p": (0,),
    "num_beams": (1,), "num_return_sequences": (1,), "length_penalty": (1,), "early_stopping": (False,),
}  # fmt: skip
"""Values that tasks write for an argument that is off."""


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Arguments that `--model_args` may set.

    Attributes:
        model: the target, a name of the catalogue, or a folder with a checkpoint.
        draft: the same for the draft; None decodes with the target alone.
        dtype: number format of both, such as bf16; None for the device's default.
        device: auto, cpu, cuda, or one GPU such as cuda:1.
        num_draft_tokens: K.
        verification: name of a rule.
        batch_size: texts that are decoded or scored together.
        max_length: most tokens of prompt and answer together; None for the models' context.
        max_gen_toks: most tokens of an answer, unless its task says.
        seed: the same seed gives the same answers to the same tasks.
    """

    model: str
    draft: str | None = None
    dtype: str | None = None
    device: str = "auto"
    num_draft_tokens: int = int(SpeculationConfig().num_draft_tokens)
    verification: str = DEFAULT
    batch_size: int = 1
    max_length: int | None = None
    max_gen_toks: int = 256
    seed: int = 0

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Self:
        """Read arguments whose values the harness has parsed; raises ConfigError for all problems together."""
        known = [argument.name for argument in fields(cls)]
        problems = [unknown_name("model argument", name, known) for name in given if name not in known]
        if "model" not in given:
            problems.append("a model is required: give --model_args model=NAME, or the folder of a checkpoint")
        refuse(problems)
        values = {name: value for name, value in given.items() if value is not None}
        numbers = {name: int(value) for name, value in values.items() if isinstance(value, str) and value.isdecimal()}
        return cls(**check_types(cls, values | numbers))

    def settings(self) -> dict[str, Any]:
        """The fields of a `RunConfig` that they decide, checked without models; raises ConfigError."""
        decided: dict[str, Any] = {
            "sampling": SamplingConfig(temperature=0.0),
            "speculation": SpeculationConfig(num_draft_tokens=self.num_draft_tokens),
            "verification": VerificationConfig(rule=self.verification),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        check_values(
            RunConfig(task=GenerateConfig(), model=ModelConfig(name=self.model), draft=DrafterConfig(), **decided)
        )
        return decided


def generation_settings(given: Mapping[str, Any], *, max_gen_toks: int) -> dict[str, Any]:
    """Read the `generation_kwargs` of a task as fields of a `RunConfig`; `max_gen_toks` is for tasks without their own.

    Without `do_sample`, a temperature above 0 samples. With `do_sample` alone the temperature is 1. Raises
    ConfigError for an argument that has no meaning here.
    """
    kept = {
        name: value for name, value in given.items() if value is not None and value not in _WITHOUT_EFFECT.get(name, ())
    }
    known = _SAMPLING | _OTHER
    refuse([unknown_name("generation argument", name, known) for name in sorted(kept.keys() - known)])
    if kept.get("do_sample"):
        kept.setdefault("temperature", 1.0)
    from lm_eval.models.utils import normalize_gen_kwargs  # noqa: PLC0415 - an optional package

    normal: Mapping[str, Any] = normalize_gen_kwargs(kept, max_gen_toks)
    sampling = {name: value for name, value in normal.items() if name in _SAMPLING}
    if not normal["do_sample"]:
        sampling["temperature"] = 0.0
    return {
        "sampling": SamplingConfig(**sampling),
        "max_new_tokens": normal["max_gen_toks"],
        "stop_strings": [stop for stop in normal["until"] if stop],
    }
