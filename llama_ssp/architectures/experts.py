"""Decoders with experts in place of an MLP: a router chooses some of them for each token.

They run as the library's modules. Each rank holds some units of every expert.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.architectures.decoders import GRANITE, OLMO2
from llama_ssp.architectures.family import Family, windows_of_layers
from llama_ssp.architectures.llama import MISTRAL, QKV, QWEN3
from llama_ssp.architectures.matrices import ATTENTION, GATED, decoder

MIXTRAL = replace(GRANITE, model_type="mixtral", windows=MISTRAL.windows)
GRANITE_MOE = replace(
    GRANITE, model_type="granitemoe",
    tp_plan={f"model.layers.*.self_attn.{name}": "rowwise" if name == "o_proj" else "colwise" for name in ATTENTION},
)  # fmt: skip
QWEN3_MOE = replace(MIXTRAL, model_type="qwen3_moe", parameters=QWEN3.parameters)
QWEN2_MOE = replace(
    MIXTRAL, model_type="qwen2_moe", parameters=partial(decoder, biased=QKV, norms=3),
    tp_plan={
        f"model.layers.*.mlp.shared_expert.{name}": "rowwise" if name == "down_proj" else "colwise" for name in GATED
    },
)  # fmt: skip
"""With the vector that weighs the MLP beside the experts."""
OLMOE = replace(OLMO2, model_type="olmoe")
DOTS1 = replace(MIXTRAL, model_type="dots1", parameters=partial(decoder, head_norms=2, routes_by_bias=True))
GLM4_MOE = replace(GRANITE, model_type="glm4_moe", parameters=partial(decoder, routes_by_bias=True))

_VOCABULARY = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
_LATENT = {f"model.layers.*.self_attn.{name}": style for name, style in (
    ("q_proj", "colwise"), ("q_b_proj", "colwise"), ("kv_a_proj_with_mqa", "replicated"), ("kv_b_proj", "colwise"),
    ("o_proj", "rowwise"),
)}  # fmt: skip
"""Every rank has the latents that keys and values are made of, and makes those of its heads."""
DEEPSEEK_V2 = Family(model_type="deepseek_v2", parameters=decoder, tp_plan=_LATENT, is_written=False)
DEEPSEEK_V3 = replace(DEEPSEEK_V2, model_type="deepseek_v3")
GPT_OSS = Family(
    model_type="gpt_oss", parameters=decoder, windows=windows_of_layers, is_written=False,
    tp_plan={**_VOCABULARY, **GRANITE_MOE.tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts"},
)  # fmt: skip

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")


def expert_sizes(field: Callable[[str], Any], *, num_layers: int) -> dict[str, Any]:
    """The sizes of experts as `ModelShape` has them, from the fields of a config; none of a dense model."""

    def first(*names: str) -> int:
        return next((value for name in names if type(value := field(name)) is int and value > 0), 0)

    num_experts, num_chosen = first(*EXPERTS), first(*_CHOSEN)
    if num_experts < 2 or not num_chosen or field("is_moe") is False:  # noqa: PLR2004 - one expert is an MLP
        return {}
    units = first("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    step, without = max(first("decoder_sparse_step"), 1), field("mlp_only_layers") or []
    dense = {number for number in range(num_layers) if (number + 1) % step or number in without}
    dense |= {*range(first("first_k_dense_replace", "moe_layer_start_index"))}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": min(num_chosen, num_experts),
        "moe_intermediate_size": units,
        "shared_intermediate_size": first("shared_expert_intermediate_size", "shared_intermediate_size")
        or (first("intermediate_size") if field("enable_moe_block") else 0)  # of a Gemma 4
        or units * (first(*_SHARED) or int(bool(field("intermediate_size_mlp")))),  # the latter is a Llama 4's
        "num_dense_layers": min(len(dense), num_layers - 1),
    }
