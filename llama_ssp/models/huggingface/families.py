"""Where families of the library differ: what their layers see, how masks reach them, and what is put in their place.

The library's own modules compute everything else. A sliding window is part of the mask: the cache keeps every slot, and
slots that are too old for a layer are masked.

Shapes: B sequences, T positions, S slots, L layers.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from llama_ssp.architectures.inventory import GEMMA_KIND, LLAMA_KIND
from llama_ssp.errors import ConfigError
from llama_ssp.models.attention import SOFTCAPPED
from llama_ssp.models.huggingface import gpt_neo

_BY_KIND_OF_LAYER = {"qwen2", "qwen3", "gemma2", "gemma3_text"}
"""Families that take a mask for each kind of layer; a window is that of their `sliding_attention` layers."""
_WINDOWED = _BY_KIND_OF_LAYER | {"mistral", "gpt_neo"}
# These recompute their frequencies from the largest position of a batch: a read, and rows would influence each other.
_ROPE_TYPES_THAT_READ_POSITIONS = {"dynamic", "longrope"}
_VOCABULARY_IS_CUT = LLAMA_KIND | GEMMA_KIND | {"phi"}


def windows_of(config: PretrainedConfig) -> tuple[int | None, ...]:
    """How many positions each layer sees, its own included; None for all of them."""
    num_layers: int = config.num_hidden_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * num_layers
    if config.model_type in _BY_KIND_OF_LAYER:
        window = config.sliding_window
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    if config.model_type == "gpt_neo":
        return gpt_neo.windows_of(config)
    return (None,) * num_layers


def check_servable(config: PretrainedConfig) -> None:
    """Refuse models whose attention sees anything else than the latest positions of its row, or all of them.

    Raises:
        ConfigError: a family's sliding windows are not known here, or it has layers without a cache of keys and
            values, attention in both directions, or rotary frequencies that depend on the positions of the batch.
    """
    model, context = f"{config.model_type} model", config.max_position_embeddings
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in _WINDOWED and "sliding_attention" in kinds and window and window < context:
        message = (
            f"this {model} has sliding windows of {window} tokens in a context of {context}, which are supported for "
            f"{', '.join(sorted(_WINDOWED))} (max_position_embeddings={window} in its config.json would do)"
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
    return "eager" if config.model_type in {"gpt_neo", "gemma2"} else "sdpa"


def adapt(model: PreTrainedModel) -> None:
    """Put in place what the library's modules lack, before weights are looked for."""
    if model.config.model_type == "gpt_neo":
        gpt_neo.adapt(model)
    elif model.config.model_type == "gemma2":
        model.config._attn_implementation = SOFTCAPPED


def mask_argument(config: PretrainedConfig, masks: Mapping[int | None, Tensor]) -> Tensor | dict[str, Tensor | None]:
    """What the library's model takes as its attention mask.

    Args:
        config: of the model.
        masks: what is added to the scores, (B, 1, T, S), for each window of its layers.
    """
    if config.model_type in _BY_KIND_OF_LAYER:
        return {"full_attention": masks.get(None), "sliding_attention": masks.get(config.sliding_window)}
    return next(iter(masks.values())) if len(masks) == 1 else torch.cat([*masks.values()], 1)


def tp_plan_of(model: PreTrainedModel) -> dict[str, str]:
    """How the modules of a model are shared by ranks: style by name, empty where nobody knows."""
    if model.config.model_type == "gpt_neo":
        return dict(gpt_neo.TP_PLAN)
    plan: dict[str, str] = dict(model.tp_plan)
    if plan and model.config.model_type in _VOCABULARY_IS_CUT:
        # Some versions of the library leave it whole, which a plan of memory could not know.
        plan.setdefault("model.embed_tokens", "embedding_rowwise")
    return plan
