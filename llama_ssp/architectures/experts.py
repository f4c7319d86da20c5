"""Decoders with experts in place of an MLP: a router chooses some of them for each token.

They run as the library's modules. Each rank holds some units of every expert.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.architectures import layers
from llama_ssp.architectures.decoders import GRANITE, MISTRAL, OLMO2, QKV, QWEN3
from llama_ssp.architectures.family import VOCABULARY_PLAN, layer_plan, unwritten
from llama_ssp.architectures.matrices import decoder

MIXTRAL = replace(GRANITE, model_type="mixtral", windows=MISTRAL.windows)
GRANITE_MOE = replace(GRANITE, model_type="granitemoe", tp_plan=layer_plan("self_attn", QKV, ["o_proj"]))
QWEN3_MOE = replace(MIXTRAL, model_type="qwen3_moe", parameters=QWEN3.parameters)
QWEN2_MOE = replace(
    MIXTRAL, model_type="qwen2_moe", parameters=partial(decoder, biased=QKV, norms=3),
    tp_plan=layer_plan("mlp.shared_expert", ["gate_proj", "up_proj"], ["down_proj"]),
)  # fmt: skip
"""With the vector that weighs the MLP next to the experts."""
OLMOE = replace(OLMO2, model_type="olmoe")
DOTS1 = replace(MIXTRAL, model_type="dots1", parameters=partial(decoder, head_norms=2, routes_by_bias=True))
GLM4_MOE = replace(GRANITE, model_type="glm4_moe", parameters=partial(decoder, routes_by_bias=True))

LATENT_PLAN = layer_plan("self_attn", ["q_proj", "q_b_proj", "kv_b_proj"], ["o_proj"])
"""Every rank has the latents that keys and values are made of, and makes keys and values of its heads."""
DEEPSEEK_V3 = unwritten("deepseek_v3", tp_plan=LATENT_PLAN, modules=layers.latent)
DEEPSEEK_V2 = unwritten("deepseek_v2", modules=partial(layers.latent, biases_router=False))
GLM4_MOE_LITE = unwritten("glm4_moe_lite", modules=partial(layers.latent, cuts_shared=False))
GPT_OSS = unwritten(
    "gpt_oss", tp_plan={**VOCABULARY_PLAN, **GRANITE_MOE.tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"},
    modules=layers.gpt_oss,
)  # fmt: skip
DOGE, FLEX_OLMO, LAGUNA, MIMO_V2_FLASH, MINIMAX_M2, MINIMAX_M3 = (
    unwritten(kind, keeps_attention=True)
    for kind in ("doge", "flex_olmo", "laguna", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text")
)
LLAMA4 = unwritten("llama4_text", num_masks=3, adapt="llama_ssp.models.huggingface.llama4:adapt")
MINICPM3 = unwritten("minicpm3", cuts_own_embedding=True, modules=layers.latent)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk")
_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_UNITS = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_OF_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
_DENSE = ("first_k_dense_replace", "moe_layer_start_index")


def first_size(field: Callable[[str], Any], *names: str) -> int:
    """The first of some fields of a config that has a size above 0, of the layers the largest; 0 if none has."""
    for name in names:
        values = value if isinstance(value := field(name), list) else [value]
        if size := max((value for value in values if type(value) is int), default=0):
            return size
    return 0


def expert_sizes(field: Callable[[str], Any], *, num_layers: int) -> dict[str, Any]:
    """The sizes of experts as `ModelShape` has them, from the fields of a config; none of a dense model."""
    first = partial(first_size, field)
    num_experts, num_chosen = first(*EXPERTS), first(*_CHOSEN)
    if num_experts < 2 or not num_chosen or field("is_moe") is False:  # noqa: PLR2004 - one expert is an MLP
        return {}
    units = first(*_UNITS)
    step, without = max(first("decoder_sparse_step", "interleave_moe_layer_step"), 1), field("mlp_only_layers") or []
    dense = {number for number in range(num_layers) if (number + 1) % step or number in without}
    dense |= {*range(first(*_DENSE))}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": min(num_chosen, num_experts),
        "moe_intermediate_size": units,
        "shared_intermediate_size": first(*_OF_SHARED)
        or (first("intermediate_size") if field("enable_moe_block") else 0)  # of a Gemma 4
        or units * (first(*_SHARED) or int(bool(field("intermediate_size_mlp")))),  # the latter is a Llama 4's
        "num_dense_layers": min(len(dense), num_layers - 1),
    }
