"""Which models run, and on how many ranks, by config.json alone: a plan says it, and a run before its ranks start.

The tables hold what transformers 5.23 has; a test compares them with it.
"""

from collections.abc import Callable
from typing import Any

from llama_ssp.architectures.family import families, record_of
from llama_ssp.errors import ConfigError, PlacementError

_OTHER_LAYERS = {
    "linear_attention": (
        "bailing_hybrid", "bamba", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba", "mamba2",
        "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text",
        "recurrent_gemma", "zamba", "zamba2",
    ),
    "indexed_attention": ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"),
    "hybrid": ("falcon_h1", "inkling2_text", "inkling_text", "zaya"),
    "conv": ("lfm2", "lfm2_moe", "lfm3"),
    "chunked_attention": ("llama4_text",),
    "compressed_sparse_attention": ("deepseek_v4",),
    "heavily_compressed_attention": ("deepseek_v4",),
}  # fmt: skip
"""Families with layers that the static cache has no place for, whose files need not list their layers."""
_FAILURES = {
    "bloom": "ValueError: too many values to unpack",
    "openai-gpt": "RuntimeError: The size of tensor a must match the size of tensor b",
}
WITHOUT_PLAN = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "bitnet", "blenderbot",
    "blenderbot-small", "bloom", "blt", "camembert", "codegen", "cpmant", "ctrl", "data2vec-text", "dbrx", "diffllama",
    "electra", "ernie", "falcon", "fuyu", "git", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox_japanese", "gptj",
    "jetmoe", "marian", "mbart", "megatron-bert", "mllama", "modernbert-decoder", "moshi", "mpt", "mvp", "openai-gpt",
    "opt", "pegasus", "persimmon", "plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm",
    "roc_bert", "roformer", "rwkv", "trocr", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
    "xlstm", "xmod",
}  # fmt: skip
"""Families that neither the library nor a record of ours has a tensor-parallel plan for."""
_GATHERED = "q_proj by colwise_gather_output"
_STRANGE_PLANS = {"doge": "dt_proj", "flex_olmo": _GATHERED, "granite_swa": "self_attn", "minimax_m2": _GATHERED}
OTHER = "one of the families of docs/guides/models.md is required"


def check_servable(field: Callable[[str], Any]) -> None:
    """Reject models whose attention is not causal over the latest positions of a row, or over all of them.

    `field` gives a field of a config by name, None if there is none. ConfigError if the family's sliding windows are
    not supported, or it has layers without keys and values or bidirectional attention.
    """
    model_type, context, window = field("model_type"), field("max_position_embeddings"), field("sliding_window")
    model = f"{model_type} model"
    unsaid = [kind for kind, names in _OTHER_LAYERS.items() if model_type in names] or ["sliding_attention"]
    kinds = set(field("layer_types") or unsaid)
    has_windows = record_of(model_type).windows is not None
    if not has_windows and "sliding_attention" in kinds and window and context and window < context:
        windowed = [name for name, family in families().items() if family.windows]
        raise ConfigError(
            f"this {model} has sliding windows of {window} tokens in a context of {context}, which are supported for "
            f"{', '.join(sorted(windowed))} (max_position_embeddings={window} in its config.json would do)"
        )
    other = sorted(kinds - {"sliding_attention", "full_attention"})
    if other:
        raise ConfigError(
            f"this {model} has layers of kind {', '.join(other)}: sliding_attention or full_attention is required by "
            "the static cache"
        )
    # Of "vision", only images are read in both directions.
    if field("use_bidirectional_attention") not in {None, False, "vision"} or field("is_causal") is False:
        wanted = "use_bidirectional_attention=false and is_causal=true are required"
        raise ConfigError(f"this {model} attends in both directions: {wanted}")
    rope = field("rope_parameters") or {}
    for found in (rope, *(values for values in rope.values() if isinstance(values, dict))):
        rope_type = found.get("rope_type", "default")
        if not isinstance(rope_type, str):
            required = "the name of one is required, such as default or yarn"
            raise ConfigError(f"this {model} has rope_type {rope_type!r:.60}: {required}")
    if model_type in _FAILURES:
        raise ConfigError(f"{model_type} models do not run with the static cache ({_FAILURES[model_type]}): {OTHER}")


def check_ranks(model_type: str, num_ranks: int) -> None:
    """Raise PlacementError for a family that runs on fewer ranks: no tensor-parallel plan can be followed."""
    if num_ranks > 1 and model_type in WITHOUT_PLAN:
        raise PlacementError(no_plan(model_type, num_ranks))
    if num_ranks > 1 and model_type in _STRANGE_PLANS:
        raise PlacementError(
            f"the tensor-parallel plan of {model_type} cuts {_STRANGE_PLANS[model_type]}, which is not supported: run "
            f"it on one rank, not on {num_ranks}"
        )


def no_plan(model_type: str, num_ranks: int) -> str:
    """The sentence for a family without a tensor-parallel plan."""
    return f"{model_type} has no tensor-parallel plan: run it on one rank, not on {num_ranks}"
