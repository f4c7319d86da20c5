"""Saving of the pair in the form the runner and transformers load.

What it does: writes a model as bf16 safetensors with its config, generation config and the
tokenizer; reads such a folder back into the lean model.
What it does not do: train or measure.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.model import Llama, Shape
from training.tokenizer import BOS_ID, CONTEXT, EOS_ID, PAD_ID, VOCABULARY

WEIGHTS = "model.safetensors"
READABLE = 0o644


def llama_config(shape: Shape) -> LlamaConfig:
    """Returns the transformers config of a shape."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )


def to_transformers(model: Llama) -> LlamaForCausalLM:
    """Copies a lean model into transformers, rounded to bf16."""
    copy = LlamaForCausalLM(llama_config(model.shape))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    copy.eval()
    return copy


def save_model(model: Llama, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model folder that `from_pretrained` loads."""
    partial = folder.with_name(folder.name + ".partial")
    to_transformers(model).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    settings_file = partial / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings_file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(partial.iterdir()):
        file.chmod(READABLE)
        file.replace(folder / file.name)
    partial.rmdir()


def load_lean(shape: Shape, folder: Path) -> Llama:
    """Reads a saved folder into the lean model, in float32 with the rounded values."""
    model = Llama(shape)
    state = {name: value.float() for name, value in load_file(folder / WEIGHTS).items()}
    if shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def save_checkpoint(model: Llama, file: Path) -> None:
    """Writes the float32 weights, so that training can go on from them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.shape.tied:
        del state["lm_head.weight"]
    partial = file.with_suffix(".partial")
    save_file(state, partial)
    partial.replace(file)


def load_checkpoint(model: Llama, file: Path) -> None:
    """Reads float32 weights written by `save_checkpoint`."""
    state = load_file(file)
    if model.shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
