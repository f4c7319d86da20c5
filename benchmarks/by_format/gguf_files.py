"""Llama checkpoints in fp32 as files of llama.cpp, by the package gguf, without a vocabulary: prompts are ids.

Shapes: H heads, D head dim, O outputs, I inputs.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

_PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """The name of a tensor of transformers in llama.cpp."""
    part = name.removesuffix(".weight")
    if not part.startswith("model.layers."):
        return f"{_PARTS[part]}.weight"
    _, _, layer, inside = part.split(".", 3)
    return f"blk.{layer}.{_PARTS[inside]}.weight"


def pairs_as_neighbours(weight_OI: Any, num_heads: int) -> Any:  # noqa: ANN401 - an array of numpy
    """Reorder the outputs of queries or keys: llama.cpp turns neighbours, transformers a head's two halves."""
    halves = weight_OI.reshape(num_heads, 2, -1, weight_OI.shape[1])
    return halves.swapaxes(1, 2).reshape(weight_OI.shape)


def write(folder: Path, file: Path, form: str) -> None:
    """Write a checkpoint; matrices are in the number format that `form` names, norms in fp32."""
    gguf, read = import_module("gguf"), import_module("safetensors.numpy").load_file
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[form]
    for name, stored in read(folder / "model.safetensors").items():
        if stored.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
            continue
        num_heads = heads.get(name.split(".")[-2])
        values = pairs_as_neighbours(stored, num_heads) if num_heads else stored
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)
