"""Tiny models with random weights, saved as the library saves them, and the library's own answers to compare with."""

import re
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from llama_ssp.architectures.family import record_of
from llama_ssp.architectures.matrices import WholeParts
from llama_ssp.errors import SspError
from llama_ssp.models.llama.decoder import LeanRunner
from llama_ssp.models.loading import load_model
from llama_ssp.models.quantization.precision import UNQUANTIZED, Precision
from llama_ssp.models.runner import Runner
from llama_ssp.models.weights import Loading
from llama_ssp.ranks.comms import Comm
from llama_ssp.weights.checkpoint import inspect
from llama_ssp.weights.in_memory import weights_of
from llama_ssp.weights.source import WeightSource
from tests.helpers import extensions
from tests.helpers.fake_comm import ThreadComm, on_ranks

VOCAB_SIZE = 200
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_NORM = re.compile(r"(norm|ln_\w+)\.weight$|router\.\w*scale$|layer_scalar$")
WINDOW = 6
_SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_GROUPED = {"num_key_value_heads": 4, "head_dim": 16}
_LAYER_TYPES = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
_DELTA = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_KIMI = _LATENT | {
    "q_lora_rank": None,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {
    "num_key_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 8,
}
_NEMOTRON = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 8,
    "num_hidden_layers": 3,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA = {"num_key_value_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
_GEMMA4 = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": _LAYER_TYPES,
}
# Sizes beside SIZES: 8 heads over 4 key-value heads do not divide by 3 ranks, nor 160 MLP units into blocks of 64.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4},
    "gpt_neox": {"rotary_pct": 0.5},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    "phi": {"num_key_value_heads": 4},
    "gemma": {"num_key_value_heads": 4, "head_dim": 16},
    "mistral": {"num_key_value_heads": 4, "sliding_window": WINDOW},
    "qwen2, windows": {"num_key_value_heads": 2, **_SLIDES},
    "qwen3, windows": {"num_key_value_heads": 4, "head_dim": 16, **_SLIDES},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "gemma3_text": _GEMMA | {"sliding_window_pattern": 2},
    "gpt_neo": {"window_size": WINDOW},
    "gemma4_text": _GEMMA4
    | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 4.0,
    },
    "gemma4_text, keys": _GEMMA4
    | {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    # `architectures.decoders`
    "seed_oss": _GROUPED,
    "ministral": _GROUPED | {"sliding_window": WINDOW},
    "cwm": _GROUPED | {"sliding_window": WINDOW, "layer_types": _LAYER_TYPES, "rope_parameters": _ROPE},
    "phi3": {"num_key_value_heads": 4},
    "phi3, partial": {"num_key_value_heads": 4, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "phi3, windows": {"num_key_value_heads": 4, "sliding_window": WINDOW},
    "phi3, longrope": {
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 64,
        "rope_parameters": _ROPE
        | {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
    "llama, dynamic": {"num_key_value_heads": 4, "rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 2.0}},
    "olmo2, dynamic": {"num_key_value_heads": 4, "rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 2.0}},
    "ministral3": _GROUPED | {"sliding_window": WINDOW},
    "granite": {
        "num_key_value_heads": 4,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
    "ernie4_5": _GROUPED,
    "helium": {"num_key_value_heads": 4, "head_dim": 8},
    "smollm3": {"num_key_value_heads": 4, "no_rope_layer_interval": 2},
    "exaone4": {"num_key_value_heads": 4, "sliding_window": WINDOW, "layer_types": _LAYER_TYPES},
    "hunyuan_v1_dense": _GROUPED,
    "stablelm": {"num_key_value_heads": 4, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "olmo": {"num_key_value_heads": 4},
    "olmo2": {"num_key_value_heads": 4},
    "olmo3": {"num_key_value_heads": 4, "sliding_window": WINDOW, "layer_types": _LAYER_TYPES},
    "cohere": {"num_key_value_heads": 4},
    "cohere2": _GROUPED | {"sliding_window": WINDOW, "layer_types": _LAYER_TYPES},
    "glm": _GROUPED,
    "glm4": _GROUPED,
    "starcoder2": {"num_key_value_heads": 4, "sliding_window": WINDOW},
    "arcee": _GROUPED,
    "apertus": {"num_key_value_heads": 4},
    "nemotron": _GROUPED,
    # with experts
    "mixtral": {"num_key_value_heads": 4, "num_local_experts": 4},
    "qwen2_moe": _EXPERTS | {"num_key_value_heads": 4, "shared_expert_intermediate_size": 64},
    "qwen3_moe": _EXPERTS | _GROUPED,
    "olmoe": {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _GROUPED | _ROUTED,
    "dots1": _GROUPED | _ROUTED,
    # without records
    "gpt_oss": _GROUPED
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": _LAYER_TYPES,
    },
    "deepseek_v2": _ROUTED | _LATENT,
    "deepseek_v3": _ROUTED | _LATENT,
    "nanochat": {"num_key_value_heads": 4},
    "xglm": {},
    # hybrids
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_next, dense": _DELTA | {"num_experts": 0, "decoder_sparse_step": 1},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 48},
    "kimi_linear": _KIMI | {"mlp_layer_types": ["dense", "sparse"]},
    "kimi_linear, dense": _KIMI | {"mlp_layer_types": ["dense", "dense"]},
    "olmo_hybrid": {key: value for key, value in _DELTA.items() if key != "head_dim"},
    "lfm2": _GROUPED | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _GROUPED | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "position_embedding_type": "rope",
    },
    "granitemoehybrid, dense": _MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": _MAMBA | {"head_dim": 8, "mamba_d_ssm": 128, "mamba_rms_norm": True, "ssm_in_multiplier": 1.5},
    "falcon_h1, plain": _MAMBA | {"head_dim": 8, "mamba_d_ssm": 128},
    "nemotron_h": _NEMOTRON | {"layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
    "nemotron_h, experts": _NEMOTRON
    | {
        "layer_types": ["linear_attention", "full_attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
    },
}


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """The configuration of a tiny model of one family, or of a kind of it (`qwen2, windows`)."""
    model_type, sizes = family.partition(",")[0], {**SIZES, **FAMILIES.get(family, {}), **changes}
    if model_type == "gpt_neo":
        sizes["num_heads"], sizes["num_layers"] = sizes.pop("num_attention_heads"), sizes.pop("num_hidden_layers")
        kinds = [["global" if number % 2 else "local"] for number in range(sizes["num_layers"])]
        sizes.setdefault("attention_types", [[kind, 1] for kind in kinds])
    if "num_kv_shared_layers" in sizes:
        sizes["num_kv_shared_layers"] = min(sizes["num_kv_shared_layers"], sizes["num_hidden_layers"] // 2)
    if model_type == "olmo_hybrid":  # which has layers of both kinds
        sizes["num_hidden_layers"] = max(sizes["num_hidden_layers"], 2)
    for name in {"layer_types", "mlp_layer_types"} & sizes.keys():
        sizes[name] = [*islice(cycle(sizes[name]), sizes["num_hidden_layers"])]
    config: PretrainedConfig = CONFIG_MAPPING[model_type](**sizes)
    return config


def library_attention(config: PretrainedConfig) -> dict[str, str]:
    """What the library is asked for: by default older versions leave out what bends Gemma 2's scores."""
    return {"attn_implementation": "eager"} if config.model_type == "gemma2" else {}


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """A tiny model of one family; all that is stored is random, biases and norms too, so that a lost one shows."""
    config = tiny_config(family, **changes)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **library_attention(config))
    else:
        model = extensions.module_of("modules.texts").causal_class(type(config))(config)
    generator = torch.Generator().manual_seed(0)
    ties = model.all_tied_weights_keys
    for name, parameter in (dict(model.named_parameters()) | model.state_dict(keep_vars=True)).items():
        if name in ties:
            continue
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data = noise + 1 if _NORM.search(name) else noise
    model.eval().requires_grad_(requires_grad=False)
    return model


def build_checkpoint(
    folder: Path, family: str, *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB", **changes: object
) -> PreTrainedModel:
    """Save a tiny model into `folder`; returns it as the library holds it."""
    model = tiny_model(family, **changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def library_logits(model: PreTrainedModel, ids_T: Tensor) -> Tensor:
    """The library's logits (T, V) for one sequence, through its own dynamic cache in two calls."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    head, tail = ids_T[None, :-2], ids_T[None, -2:]
    pieces = [model(piece, past_key_values=cache, use_cache=True).logits for piece in (head, tail)]
    return torch.cat(pieces, dim=1)[0].float()


def load_lean(
    model: PreTrainedModel | WeightSource | Path,
    *,
    comm: Comm | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    precision: Precision = UNQUANTIZED,
    **options: Any,
) -> LeanRunner:
    """The lean decoder of a model in memory, of any weight source, or of a folder, with options of its own."""
    origin: WeightSource = inspect(model) if isinstance(model, Path) else model  # type: ignore[assignment]
    if isinstance(model, PreTrainedModel):
        origin = weights_of(model, what="model")
    comm, device = comm or Comm.single(), device or torch.device("cpu")
    loading = Loading(origin, device=device, comm=comm, dtype=dtype, precision=precision)
    return LeanRunner(loading, **options)


def load_modules(loading: Loading) -> PreTrainedModel:
    """A rank's slices in the modules of the library, which the extension of modules fills."""
    model: PreTrainedModel = extensions.module_of("modules.building").load_modules(loading)
    return model


def module_runner(model: PreTrainedModel, *, comm: Comm | None = None, **how: Any) -> Any:
    """The runner of a model of the library, by default on one rank."""
    return extensions.module_of("modules.runner").ModuleRunner(model, comm=comm or Comm.single(), **how)


def load_ranks(folder: Path, comms: Sequence[ThreadComm], *, whole: WholeParts = WholeParts.none) -> list[Runner]:
    """Load a checkpoint on ranks that are threads: one after the other, but for the comparison of a family.

    As in a run, they agree whether a token's bits depend on others.
    """
    origin, device = inspect(folder), torch.device("cpu")
    if record_of(origin.shape.model_type).is_written or len(comms) == 1:
        runners = [load_model(Loading(origin, device=device, comm=comm, whole=whole)) for comm in comms]
        for runner in runners:
            runner.is_invariant = all(each.is_invariant for each in runners)
        return runners
    modules = [load_modules(Loading(origin, device=device, comm=comm)) for comm in comms]
    return on_ranks(comms, lambda comm: module_runner(modules[comm.rank], comm=comm))


def refusal(check: Callable[[], object]) -> str:
    """The sentence with which a check refuses something; empty if it does not."""
    try:
        check()
    except SspError as error:
        return str(error)
    return ""
