"""MTP layers, which are stored with a model and are its draft head: each predicts a token one position later.

    token i + 1 + k, embedded by the target  | enorm \
    hidden state of token i, as below        | hnorm - eh_proj | decoder layer of module k | norm | the target's output

The first module reads the target's hidden state after its final norm. Module k drafts token k + 1 of a round: it reads
the output of module k - 1 after its norm, as in DeepSeek's report and in transformers. The modules of MiMo-V2 all read
the target's hidden state before its final norm, as in SGLang. For tokens beyond the modules, the last one reads its own
output, one pair later each time, as a single module always does.

Layouts by the names of their tensors; L layers of the target:

    ours                   DeepSeek V3, GLM 4.5    MiMo                      Qwen3-Next, Qwen3.5, K-EXAONE
    model.layers.k.*       model.layers.(L + k).*  model.mtp_layers.k.*      mtp.layers.k.*
      .enorm                 .enorm                  .token_layernorm        mtp.pre_fc_norm_embedding
      .hnorm                 .hnorm                  .hidden_layernorm       mtp.pre_fc_norm_hidden
      .eh_proj               .eh_proj                .input_proj, columns    mtp.fc
                                                     of hnorm first
    model.norm, of others    .shared_head.norm       .final_layernorm        mtp.norm
      model.layers.k.norm

    ours                   MiMo-V2                     ERNIE 4.5
    model.layers.k.*       model.mtp.layers.k.*        model.mtp_block.k.*
      .enorm                 .enorm                    model.mtp_emb_norm.k
      .hnorm                 .hnorm                    model.mtp_hidden_norm.k
      .eh_proj               .eh_proj                  model.mtp_linear_proj.k
    model.norm               .final_layernorm          that of the target, model.norm

Source: arXiv:2412.19437, section 2.2; arXiv:2505.07608 (MiMo); the readers of vLLM, SGLang, TensorRT-LLM (K-EXAONE),
FastDeploy (ERNIE 4.5) and llama.cpp (MiMo-V2).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llama_ssp.architectures.experts import EXPERTS
from llama_ssp.architectures.family import inventory, record_of
from llama_ssp.architectures.matrices import Matrix
from llama_ssp.architectures.model_files import LAYERS_AHEAD, num_layers_ahead
from llama_ssp.catalogue import ModelShape
from llama_ssp.errors import ConfigError

MTP_KINDS = (
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "mimo_v2_flash",
    "qwen2",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
"""Families whose MTP layers are read; `qwen2` stands for MiMo."""
_OTHER_DRAFTS = "give an EAGLE-3 head of the target, or a smaller model, as draft=NAME"
_UNSAID = {"qwen3_next": 1, "mimo_v2_flash": 3}
"""Modules of families whose config.json does not say how many there are."""
_DENSE = {"ernie4_5_moe": "full_attention", "exaone_moe": "full_attention", "mimo_v2_flash": "sliding_attention"}
"""Families whose modules have an MLP in place of experts, and the attention of these modules."""
_UNCHAINED = {"mimo_v2_flash"}
"""Families whose modules all read the target's hidden state, before its final norm."""
_SHARING_NORM = {"ernie4_5_moe"}
"""Families whose modules have the target's final norm as their last one."""
_NORMS_APART = re.compile(r"^model\.mtp_(\w+_(?:norm|proj))\.([0-9]{1,9})\.")
_MODULE = r"model\.(?:layers|mtp_layers|mtp\.layers|mtp_block)\.([0-9]{1,9})\.|mtp\.(?:layers\.([0-9]{1,9})\.)?"
_OURS = (
    (r"(?:enorm|token_layernorm|pre_fc_norm_embedding|emb_norm)\.", "enorm."),
    (r"(?:hnorm|hidden_layernorm|pre_fc_norm_hidden|hidden_norm)\.", "hnorm."),
    (r"(?:eh_proj|input_proj|fc|linear_proj)\.", "eh_proj."),
    (r"(?:shared_head\.norm|final_layernorm|norm)\.", "norm."),
    (r"pre_mlp_layernorm\.", "post_attention_layernorm."),
    (r"", ""),
)
JOIN, JOINED_NORMS = "eh_proj", ("enorm", "hnorm")
"""The product of both normed inputs, of which every rank has all weights, and the norms."""
HIDDEN_FIRST = ".mtp_layers."
"""A part of the names of layers whose product has the columns of the hidden state first."""


def no_mtp(where: object) -> str:
    """The sentence for a target without MTP layers."""
    return f"draft=mtp drafts with the MTP layers of the target, and {where} has none: {_OTHER_DRAFTS}"


def _not_read(where: object, model_type: str) -> str:
    kinds = ", ".join(MTP_KINDS)
    return f"draft=mtp reads the MTP layers of {kinds} models, and {where} is a {model_type} model: {_OTHER_DRAFTS}"


def num_modules(field: Callable[[str], Any]) -> int:
    """The modules that are read, of a model whose config has these fields; of a Llama kind the first one."""
    model_type = str(field("model_type"))
    found = _UNSAID.get(model_type) or num_layers_ahead(field)
    return min(found, 1) if record_of(model_type).is_llama_kind else found


def check_mtp(field: Callable[[str], Any], where: object) -> None:
    """Raise ConfigError unless config.json, whose fields `field` gives, describes MTP layers that are read."""
    if not num_modules(field):
        raise ConfigError(no_mtp(where))
    if (model_type := str(field("model_type"))) not in MTP_KINDS:
        raise ConfigError(_not_read(where, model_type))


def reads_before_norm(model_type: str) -> bool:
    """Whether all modules read the target's hidden state, before its final norm; else each reads the one before."""
    return model_type in _UNCHAINED


def shares_norm(model_type: str) -> bool:
    """Whether the target's final norm is the last one of its modules as well."""
    return model_type in _SHARING_NORM


def of_modules(content: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the config of a model whose layers are like the `number` modules of a model with this config.

    Either all of these layers have experts, or none has.
    """
    attention = _DENSE.get(str(content.get("model_type")))
    kinds = content.get("mtp_layer_types") or [attention or "full_attention"] * number
    of_layers = {"layer_types": kinds[:number], "mlp_layer_types": ["dense" if attention else "sparse"] * number}
    without = {name: 1 for name in EXPERTS if name in content} | {"moe_layer_start_index": number}
    return {
        **content,
        "num_hidden_layers": number,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        **{name: kinds for name, kinds in of_layers.items() if content.get(name)},
        **(without if attention else {}),
        **dict.fromkeys(LAYERS_AHEAD, 0),
    }


def with_join(shape: ModelShape) -> ModelShape:
    """The sizes of a head, from a model of its layers; where a record `is_written`, with the modules of the join."""
    if not record_of(shape.model_type).is_written:
        return shape
    held, width = inventory(shape), shape.hidden_size
    join = Matrix(module=JOIN, num_rows=width, num_columns=2 * width)
    vectors = held.layer_vectors + len(JOINED_NORMS) * width
    last = held.final_vectors + (shape.num_hidden_layers - 1) * width
    modules = replace(held, layer=(*held.layer, join), layer_vectors=vectors, final_vectors=last)
    return replace(shape, modules=modules)


def our_names(stored: str, num_layers: int, number: int) -> list[str]:
    """Our names of a tensor of the first `number` modules of a model of `num_layers`; none for other tensors."""
    stored = _NORMS_APART.sub(r"model.mtp_block.\2.\1.", stored)
    place = re.match(_MODULE, stored)
    rest = stored[place.end() :] if place else ""
    if not place or not rest or rest.startswith(("shared_head.head.", "embed_tokens.")):  # also copies of the target's
        return []
    said = place[1] or place[2]
    first = num_layers if stored.startswith("model.layers.") else 0
    modules = range(number) if said is None else {int(said) - first} & {*range(number)}  # all share what none has
    pattern, ours = next((pattern, ours) for pattern, ours in _OURS if re.match(pattern, rest))
    name = re.sub(f"^(?:{pattern})", ours, rest)
    return [name_in_module(module, name) for module in modules]


def name_in_module(module: int, name: str) -> str:
    """Our name of a tensor of a module; the first one has the last norm of a model."""
    return f"model.{name}" if module == 0 and name.startswith("norm.") else f"model.layers.{module}.{name}"
