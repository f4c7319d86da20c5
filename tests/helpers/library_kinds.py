"""What transformers' configuration classes say of the kinds that llama_ssp/architectures/kinds.json lists; tiny ones.

.venv/bin/python -m tests.helpers.library_kinds    writes that file
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import import_module
from importlib.resources import files
from inspect import getsource
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from llama_ssp.architectures.family import check_servable, record_of
from llama_ssp.errors import ConfigError

FILE = Path(str(files("llama_ssp"))) / "architectures" / "kinds.json"
NAMES = {
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_attention_heads",
    "num_heads",
    "attention_heads",
    "n_head",
    "n_heads",
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query",
    "new_decoder_architecture",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "tie_word_embeddings",
    "sliding_window",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "top_k_experts",
    "moe_topk",
    "n_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
    "moe_intermediate_size",
    "expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "first_k_dense_replace",
    "moe_layer_start_index",
    "decoder_sparse_step",
    "enable_moe_block",
    "is_moe",
    "intermediate_size_mlp",
    "num_kv_shared_layers",
    "attention_k_eq_v",
    "num_global_key_value_heads",
    "hidden_size_per_layer_input",
    "global_head_dim",
    "use_double_wide_mlp",
    "vocab_size_per_layer_input",
    "interleave_moe_layer_step",
    "q_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "attention_bias",
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "conv_L_cache",
    "conv_bias",
    "conv_kernel",
    "linear_conv_kernel_dim",
    "linear_head_dim",
    "linear_key_head_dim",
    "linear_num_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_ssm",
    "mamba_d_state",
    "mamba_expand",
    "mamba_head_dim",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_num_heads",
    "mamba_rms_norm",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_groups",
    "num_dense_layers",
    "ssm_state_size",
    "use_conv_bias",
}
"""Fields that `architectures.reading`, `.experts`, `.gemma` and `.layers` read."""


ENCODERS = ("bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "rembert", "roc_bert")
_WITHOUT_POSITIONS = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "camembert",
    "cpmant",
    "data2vec-text",
    "marian",
    "mbart",
    "moshi",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "reformer",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "trocr",
    "xlm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xlnet",
    "xmod",
)
FAILS = dict.fromkeys(_WITHOUT_POSITIONS, "they take no positions of tokens") | {
    "bloom": "ValueError: too many values to unpack",
    "hrm_text": "parts of their tensors are joined while they are loaded",
    "openai-gpt": "RuntimeError: The size of tensor a must match the size of tensor b",
}
"""Kinds that do not run, and why."""
UNCUT = ("longcat_flash",)
"""Kinds whose plan in the library no run follows: ranks would add the output of identity experts up."""
TEXTS = ("mistral4",)
"""Kinds with a causal language model that the library's mapping lacks, which stand in parts of other kinds."""
EQUAL = (
    "aria",
    "aya_vision",
    "cohere2_vision",
    "cosmos3_edge",
    "cosmos3_omni",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "exaone4_5",
    "fuyu",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glmasr",
    "glmga",
    "got_ocr2",
    "granite_docling",
    "granite_speech",
    "granite_speech_plus",
    "hunyuan_vl",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "lighton_ocr",
    "llama4",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "moss_transcribe_diarize",
    "paddleocr_vl",
    "pp_chart2table",
    "qianfan_ocr",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_asr",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
    "voxtral",
)
"""Kinds that also read images or audio whose tiny model has the same text here as in the library."""
TINY = {
    **dict.fromkeys(("num_layers", "n_layer", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads"), 8),
    **dict.fromkeys(("n_embd", "d_model", "embedding_size"), 64),
    **dict.fromkeys(("ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 160),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "zero_expert_num"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    "num_key_value_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_positions": 128,
    "intermediate_multiple_size": 2,
    "sliding_window": 6,
    "is_decoder": True,
    "default_language": "en_XX",
}
_LATENT = {"num_key_value_heads": 8, "head_dim": 8}
_ROPES_BY_LAYER, _LAYERS = ("cohere_compass_text",), ("sliding_attention", "full_attention")
_ODD: dict[str, dict[str, Any]] = {
    "longcat_flash": {"num_hidden_layers": 4, "num_layers": 2},
    "modernbert-decoder": {"pad_token_id": 0},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    },
}


def tiny_sizes(kind: str) -> dict[str, Any]:
    """Sizes beside those of `tests.helpers.models.SIZES` for any kind whose configuration is flat."""
    config = CONFIG_MAPPING[kind]
    known = {each.name for each in fields(config)} | config.attribute_map.keys()
    sizes = TINY | (_LATENT if "kv_lora_rank" in known else {})
    return fitting(config, sizes) | _sections(kind, known) | _ODD.get(kind, {})


def fitting(config: type[PretrainedConfig], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a configuration class has."""
    known = {each.name for each in fields(config)} | config.attribute_map.keys()
    return {name: size for name, size in sizes.items() if name in known}


def _sections(kind: str, known: Collection[str]) -> dict[str, Any]:
    """Sections of a tiny head for kinds whose tokens have three positions."""
    config = CONFIG_MAPPING[kind]
    if "mrope_section" not in getsource(import_module(config.__module__.replace(".configuration_", ".modeling_"))):
        return {}
    rope = getattr(config(), "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    width = TINY["head_dim"] if "head_dim" in known else _LATENT["head_dim"]
    pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    rope |= {"mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}
    return {"rope_parameters": dict.fromkeys(_LAYERS, rope) if kind in _ROPES_BY_LAYER else rope}


def text_kinds() -> dict[str, str]:
    """The kinds of the text parts of models that also read images or audio, by the kinds of these."""
    found = {}
    for kind in {*MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        if "text_config" in CONFIG_MAPPING[kind].sub_configs:
            found[kind] = CONFIG_MAPPING[kind]().get_text_config().model_type
    return found


def library_kinds() -> dict[str, dict[str, Any]]:
    found, parts = {}, text_kinds()
    alone = {*(parts[kind] for kind in EQUAL), *TEXTS}
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} | alone):
        config = CONFIG_MAPPING[kind]
        given = {each.name: each.default for each in fields(config)}
        defaults = {name: value for name, value in given.items() if isinstance(value, int | str) and name in NAMES}
        names = {name: other for name, other in config.attribute_map.items() if name in NAMES}
        for name, other in names.items():
            if isinstance(value := given.get(other), int | str):
                defaults[name] = value
        plan = {**(config.base_model_tp_plan or {}), **record_of(kind).tp_plan}
        without = (kind in UNCUT or not any(".*." in name for name in plan)) and may_run(kind)
        facts = {
            "names": names,
            "defaults": defaults,
            "without_plan": without,
            "is_encoder": kind in ENCODERS,
            "fails": FAILS.get(kind),
        }
        found[kind] = {key: value for key, value in facts.items() if value}
    for kind, text in parts.items():
        if kind in EQUAL or may_run(text):
            found[kind] = found.get(kind, {}) | {"text": text if kind in EQUAL else ""}
    return dict(sorted(found.items()))


def every_kind() -> list[str]:
    """The kinds that may continue a text, text parts of larger models among them."""
    return [kind for kind, facts in json.loads(FILE.read_text()).items() if "text" not in facts]


def may_run(kind: str) -> bool:
    """Whether a kind is a text model of layers that a run has a cache for."""
    if {"text_config", "decoder"} & CONFIG_MAPPING[kind].sub_configs.keys():
        return False
    try:
        check_servable({"model_type": kind, "is_decoder": True}.get)
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    lines = [f" {json.dumps(kind)}: {json.dumps(facts)}" for kind, facts in library_kinds().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
