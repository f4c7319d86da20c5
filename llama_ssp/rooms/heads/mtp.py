"""MTP layers: stored with a model, each predicts one token further. The first one is a draft head of its own target.

    token i + 1, embedded by the target | enorm \
    hidden state of token i             | hnorm - eh_proj | decoder layer, as of the target | norm | the target's output

The hidden state is the target's after its final norm, or in later steps the head's own after `norm`, as in vLLM,
SGLang and transformers. Layouts by the names of their tensors:

    ours                   DeepSeek V3, GLM 4.5    MiMo                      Qwen3-Next, Qwen3.5
    model.layers.0.*       model.layers.L.*        model.mtp_layers.0.*      mtp.layers.0.*
      .enorm                 .enorm                  .token_layernorm        mtp.pre_fc_norm_embedding
      .hnorm                 .hnorm                  .hidden_layernorm       mtp.pre_fc_norm_hidden
      .eh_proj               .eh_proj                .input_proj, columns    mtp.fc
                                                     of hnorm first
    model.norm               .shared_head.norm       .final_layernorm        mtp.norm

Source: arXiv:2412.19437, section 2.2; arXiv:2505.07608 (MiMo).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.matrices import Matrix
from llama_ssp.architectures.model_files import LAYERS_AHEAD, num_layers_ahead
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError

MTP_KINDS = (
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
"""Families whose MTP layers are read; those of `qwen2` are MiMo's."""
_OTHER_DRAFTS = "give an EAGLE-3 head of the target, or a smaller model, as draft=NAME"
_UNSAID = "qwen3_next", "mimo_v2_flash"
"""Families with MTP layers whose config.json does not say it."""
_OURS = (
    (r"(?:enorm|token_layernorm|pre_fc_norm_embedding)\.", "model.layers.0.enorm."),
    (r"(?:hnorm|hidden_layernorm|pre_fc_norm_hidden)\.", "model.layers.0.hnorm."),
    (r"(?:eh_proj|input_proj|fc)\.", "model.layers.0.eh_proj."),
    (r"(?:shared_head\.norm|final_layernorm|norm)\.", "model.norm."),
    (r"", "model.layers.0."),
)
JOIN, JOINED_NORMS = "eh_proj", ("enorm", "hnorm")
"""The product of both normed inputs, which every rank has whole, and their norms."""
HIDDEN_FIRST = ".mtp_layers."
"""A part of the names of layers whose product has the columns of the hidden state first."""


def no_mtp(where: object, model_type: str = "") -> str:
    """The sentence for a target without MTP layers, or of a family whose layers are not read."""
    if model_type in _UNSAID:
        return _not_read(where, model_type)
    return f"draft=mtp drafts with the MTP layers of the target, and {where} has none: {_OTHER_DRAFTS}"


def _not_read(where: object, model_type: str) -> str:
    kinds = ", ".join(MTP_KINDS)
    return f"draft=mtp reads the MTP layers of {kinds} models, and {where} is a {model_type} model: {_OTHER_DRAFTS}"


def check_mtp(field: Callable[[str], Any], where: object) -> None:
    """Raise ConfigError unless config.json, whose fields `field` gives, describes MTP layers that are read."""
    model_type = str(field("model_type"))
    if not (num_layers_ahead(field) or model_type in _UNSAID):
        raise ConfigError(no_mtp(where))
    if model_type not in MTP_KINDS:
        raise ConfigError(_not_read(where, model_type))


def of_one_layer(content: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model whose one layer is like the MTP layer of a model with this config: with all experts."""
    one = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    return {
        **content, "num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1,
        **{name: kinds for name, kinds in one.items() if content.get(name)}, **dict.fromkeys(LAYERS_AHEAD, 0),
    }  # fmt: skip


def with_join(shape: ModelShape) -> ModelShape:
    """The sizes of a head, from the sizes of a model of one layer, with the modules of a record that `is_written`."""
    if not record_of(shape.model_type).is_written:
        return shape
    held, width = inventory(shape), shape.hidden_size
    join = Matrix(module=JOIN, num_rows=width, num_columns=2 * width)
    vectors = held.layer_vectors + len(JOINED_NORMS) * width
    return replace(shape, modules=replace(held, layer=(*held.layer, join), layer_vectors=vectors))


def our_name(stored: str, num_layers: int) -> str | None:
    """Our name of a tensor of the first MTP layer of a model of `num_layers`; None for other tensors."""
    place = re.match(rf"model\.(?:layers\.{num_layers}|mtp_layers\.0)\.|mtp\.(?:layers\.0\.)?", stored)
    rest = stored[place.end() :] if place else ""
    if not rest or rest.startswith(("shared_head.head.", "embed_tokens.", "layers.")):  # also copies of the target's
        return None
    return next(ours + rest[found.end() :] for pattern, ours in _OURS if (found := re.match(pattern, rest)))
