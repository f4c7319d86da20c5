"""Reads the sizes of a model from its config.json, without the library that wrote it.

A plan knows more families than the engine runs: any dense decoder whose sizes the file has is planned as a Llama of
these sizes. A run needs a family of `architectures`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from llama_ssp.architectures.family import families, family_of, record_of
from llama_ssp.config.model_files import CONFIG_FILE, read_json, require_folder
from llama_ssp.config.schema import Dtype, ModelShape
from llama_ssp.errors import CheckpointError, PlacementError

_ALIASES = {
    "num_hidden_layers": ("num_layers", "n_layer"),
    "num_attention_heads": ("num_heads", "n_head"),
    "hidden_size": ("n_embd",),
}
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
_OF_RUNS, _OF_PLANS = (*_SIZES, "max_position_embeddings"), (*_SIZES, "intermediate_size")
"""Sizes that must be in the file of a family that the engine runs, and in that of any other."""
_ALL_SIZES = (*_OF_RUNS, "intermediate_size", "num_key_value_heads", "head_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_DECODERS = ("CausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Endings of the library's classes that continue a text."""
_UNSAID_POSITIONS = 2**17
"""Context of a model whose file names no limit."""


def read_config(folder: Path, *, any_family: bool = False) -> tuple[ModelShape, Dtype]:
    """Read the sizes and the number format of a checkpoint from its config.json.

    With `any_family`, families that the engine does not run are read too. A file that is missing, not
    JSON, or without a size raises CheckpointError, a family that is not read PlacementError.
    """
    file = folder / CONFIG_FILE
    content: Mapping[str, Any] = read_json(file)
    model_type = content.get("model_type")
    if not isinstance(model_type, str):
        raise _incomplete(file, "model_type")
    family = record_of(model_type) if any_family else family_of(model_type)
    required = _OF_RUNS
    if model_type not in families():
        content, required = _of_text(model_type, content), _OF_PLANS
    sizes = {key: size for key in _ALL_SIZES if (size := _size(content, key))}
    if missing := [key for key in required if key not in sizes]:
        raise _incomplete(file, ", ".join(missing))
    num_heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    unsaid = {
        "num_key_value_heads": num_heads,
        "head_dim": width // num_heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": _UNSAID_POSITIONS,
    }
    is_tied = bool(content.get("tie_word_embeddings", family.ties_unless_said))
    shape = ModelShape(model_type=model_type, tie_word_embeddings=is_tied, **unsaid | sizes)
    if shape.head_dim < 1:
        wanted = f"at least the {num_heads} of num_attention_heads is required"
        raise CheckpointError(f"{file} has hidden_size {shape.hidden_size}, and {wanted}: copy or download it again")
    stored = str(content.get("dtype") or content.get("torch_dtype") or Dtype.fp32.value)
    return shape, next((dtype for dtype in Dtype if dtype.value == stored), Dtype.fp32)


def check_family(folder: Path) -> None:
    """Raise PlacementError if the engine does not run the family of a checkpoint; reads its config.json alone.

    Raises CheckpointError for a file that is missing or faulty; one without a family is left to the run.
    """
    require_folder(folder)
    model_type = read_json(folder / CONFIG_FILE).get("model_type")
    if isinstance(model_type, str):
        family_of(model_type)


class SizedModel(Protocol):
    """A model by its name and its sizes, which may not be known."""

    @property
    def name(self) -> str:
        """Name in settings."""
        ...

    @property
    def shape(self) -> ModelShape | None:
        """Its sizes."""
        ...


def notes_on_families(*models: SizedModel) -> Iterator[str]:
    """Say which models the engine does not run, so that their plan is that of a Llama of the same sizes."""
    for model in models:
        if model.shape and model.shape.model_type not in families():
            yield (
                f"the engine does not run {model.shape.model_type} models: {model.name} is planned as a Llama of its "
                "sizes, and bytes and times are estimates"
            )


def _of_text(model_type: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of an unknown family's file that has the sizes; PlacementError if it is no dense decoder."""
    text = content.get("text_config")
    part = {**content, **text} if isinstance(text, dict) else content
    if any(isinstance(part.get(key), int) and part[key] > 1 for key in _EXPERTS):
        raise PlacementError(f"{model_type} models have experts, whose sizes no plan knows: a dense model is required")
    classes = content.get("architectures") or []
    if content.get("is_encoder_decoder") or (classes and not any(name.endswith(_DECODERS) for name in classes)):
        named = f" ({', '.join(classes)})" if classes else ""
        raise PlacementError(f"{model_type} models{named} do not continue a text token by token: a decoder is required")
    return part


def _size(content: Mapping[str, Any], key: str) -> int | None:
    """A size by its name, or by another one that some families have for it; None if the file lacks it."""
    names = (key, *_ALIASES.get(key, ()))
    return next((content[name] for name in names if type(content.get(name)) is int and content[name] > 0), None)


def _incomplete(file: Path, missing: str) -> CheckpointError:
    return CheckpointError(f"{file} lacks {missing}: a config.json as save_pretrained writes it is required")
