"""Decoders with experts in place of an MLP: a router chooses some of them for each token.

Each rank holds some units of every expert.
"""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.decoders import MISTRAL, QKV, QWEN3
from llama_ssp.architectures.family import VOCABULARY_PLAN, layer_plan
from llama_ssp.architectures.matrices import decoder
from llama_ssp.extensions.modules import layers
from llama_ssp.extensions.modules.records import unwritten
from llama_ssp.extensions.modules.records.decoders import GRANITE, OLMO2

MIXTRAL = replace(GRANITE, model_type="mixtral", windows=MISTRAL.windows)
GRANITE_MOE = replace(
    GRANITE,
    model_type="granitemoe",
    tp_plan=layer_plan("self_attn", QKV, ["o_proj"]),
    parameters=partial(decoder, names=[("mlp.experts", "block_sparse_moe.experts")]),
)
QWEN3_MOE = replace(MIXTRAL, model_type="qwen3_moe", parameters=QWEN3.parameters)
QWEN2_MOE = replace(
    MIXTRAL,
    model_type="qwen2_moe",
    parameters=partial(decoder, biased=QKV, norms=3, names=[("shared_experts", "shared_expert")]),
    tp_plan=layer_plan("mlp.shared_expert", ["gate_proj", "up_proj"], ["down_proj"]),
)
"""Its layers have the vector that weighs the MLP next to the experts."""
OLMOE = replace(OLMO2, model_type="olmoe")
DOTS1 = replace(MIXTRAL, model_type="dots1", parameters=partial(decoder, head_norms=2, routes_by_bias=True))
GLM4_MOE = replace(GRANITE, model_type="glm4_moe", parameters=partial(decoder, routes_by_bias=True))

LATENT_PLAN = layer_plan("self_attn", ["q_proj", "q_b_proj", "kv_b_proj"], ["o_proj"])
"""Every rank has the latents that keys and values are made of, and makes keys and values of its heads."""
DEEPSEEK_V3 = unwritten("deepseek_v3", tp_plan=LATENT_PLAN, modules=layers.latent)
DEEPSEEK_V2 = unwritten("deepseek_v2", modules=partial(layers.latent, biases_router=False))
GLM4_MOE_LITE = unwritten("glm4_moe_lite", modules=partial(layers.latent, cuts_shared=False))
GPT_OSS = unwritten(
    "gpt_oss",
    tp_plan={**VOCABULARY_PLAN, **GRANITE_MOE.tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"},
    modules=layers.gpt_oss,
)
DOGE, FLEX_OLMO, LAGUNA, MIMO_V2_FLASH, MINIMAX_M2, MINIMAX_M3 = (
    unwritten(kind, keeps_attention=True)
    for kind in ("doge", "flex_olmo", "laguna", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text")
)
LLAMA4 = unwritten("llama4_text", num_masks=3, adapt="llama_ssp.extensions.modules.llama4:adapt")
MINICPM3 = unwritten("minicpm3", cuts_own_embedding=True, modules=layers.latent)
