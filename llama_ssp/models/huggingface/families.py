"""The library's models by the records of their families: windows, masks, attention, plans, and what is replaced.

The library's own modules compute everything else. A sliding window is part of the mask: the cache keeps every slot, and
slots that are too old for a layer are masked.

Shapes: B sequences, T positions, S slots, L layers.
"""

import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.architectures.family import families, record_of
from llama_ssp.errors import ConfigError
from llama_ssp.weights.source import WeightSource

# These recompute their frequencies from the largest position of a batch: a read, and rows would influence each other.
_ROPE_TYPES_THAT_READ_POSITIONS = {"dynamic", "longrope"}


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """How many positions each layer sees, its own included; None for all of them."""
    return record_of(config.model_type).windows_of(config)


def check_servable(config: PretrainedConfig) -> None:
    """Refuse models whose attention sees anything else than the latest positions of its row, or all of them.

    Raises:
        ConfigError: a family's sliding windows are not known here, or it has layers without a cache of keys and
            values, attention in both directions, or rotary frequencies that depend on the positions of the batch.
    """
    model, context = f"{config.model_type} model", config.max_position_embeddings
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None)
    has_windows = record_of(config.model_type).windows is not None
    if not has_windows and "sliding_attention" in kinds and window and window < context:
        windowed = [name for name, family in families().items() if family.windows]
        message = (
            f"this {model} has sliding windows of {window} tokens in a context of {context}, which are supported for "
            f"{', '.join(sorted(windowed))} (max_position_embeddings={window} in its config.json would do)"
        )
        raise ConfigError(message)
    other = sorted(kinds - {"sliding_attention", "full_attention"})
    if other:
        message = (
            f"this {model} has layers of kind {', '.join(other)}: sliding_attention or full_attention is required by "
            "the static cache"
        )
        raise ConfigError(message)
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        wanted = "use_bidirectional_attention=false and is_causal=true are required"
        raise ConfigError(f"this {model} attends in both directions: {wanted}")
    rope = getattr(config, "rope_parameters", None) or {}
    for found in (rope, *(values for values in rope.values() if isinstance(values, dict))):
        if found.get("rope_type") in _ROPE_TYPES_THAT_READ_POSITIONS:
            message = (
                f"this {model} has rope_type {found['rope_type']}, which depends on the longest row of a batch: "
                "default, linear, llama3 or yarn is required"
            )
            raise ConfigError(message)


def attention_at_start(config: PretrainedConfig) -> str:
    """The attention that a model is built with, by the library's name."""
    return record_of(config.model_type).attention


def check_files(origin: WeightSource) -> None:
    """Compare a checkpoint with its config, as far as its family needs that before a model is built.

    Raises:
        CheckpointError: they do not fit.
    """
    if path := record_of(origin.config.model_type).check_files:
        _imported(path)(origin)


def _imported(path: str) -> Callable[..., None]:
    module, function = path.split(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), function)
    return found


def adapt(model: PreTrainedModel) -> None:
    """Put in place what the library's modules lack, before weights are looked for."""
    if path := record_of(model.config.model_type).adapt:
        _imported(path)(model)


def mask_argument(config: PretrainedConfig, masks: Mapping[int | None, Tensor]) -> Tensor | dict[str, Tensor | None]:
    """What the library's model takes as its attention mask.

    Args:
        config: of the model.
        masks: what is added to the scores, (B, 1, T, S), for each window of its layers.
    """
    if record_of(config.model_type).mask_by_layer_type:
        return {"full_attention": masks.get(None), "sliding_attention": masks.get(config.sliding_window)}
    return next(iter(masks.values())) if len(masks) == 1 else torch.cat([*masks.values()], 1)


def tp_plan_of(model: PreTrainedModel) -> dict[str, str]:
    """How the modules of a model are shared by ranks: style by name, empty where nobody knows."""
    family = record_of(model.config.model_type)
    plan: dict[str, str] = dict(family.tp_plan or model.tp_plan)
    if plan and family.cuts_vocabulary:
        # Some versions of the library leave it whole, which a plan of memory could not know.
        plan.setdefault("model.embed_tokens", "embedding_rowwise")
    return plan
