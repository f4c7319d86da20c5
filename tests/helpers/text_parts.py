"""Tiny checkpoints of models that read images or audio too, in the layouts in which they are published."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from llama_ssp.catalogue import CONFIG_FILE
from tests.helpers.edits import edit_tensors
from tests.helpers.library_kinds import tiny_sizes
from tests.helpers.models import SIZES, build_checkpoint

Content = dict[str, Any]
_IMAGES: Content = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers", "num_global_layers", "encoder_layers"), 1),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "intermediate_size", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
    **dict.fromkeys(("out_hidden_size", "output_dim"), SIZES["hidden_size"]),
    "image_size": 28, "patch_size": 14, "head_dim": 16, "vocab_size": SIZES["vocab_size"],
}  # fmt: skip
_UNSET = ("sliding_window",)
"""A field of text models that some of their configurations have without effect."""


def tiny_whole(kind: str, text_kind: str = "", **changes: object) -> PretrainedConfig:
    """The configuration of a model whose text part, of another kind if given, has tiny sizes, and `changes`."""
    base = CONFIG_MAPPING[kind]()
    parts = {name: each for name, each in vars(base).items() if isinstance(each, PretrainedConfig)}
    sizes = {name: _of_kind(type(part), _IMAGES) | {"model_type": part.model_type} for name, part in parts.items()}
    text_kind = text_kind or base.get_text_config().model_type
    text = {**SIZES, **tiny_sizes(text_kind), "pad_token_id": 0, **dict.fromkeys(_UNSET), **changes}
    of_text = _of_kind(CONFIG_MAPPING[text_kind], text)
    sizes["text_config"] = of_text | {"model_type": text_kind} | _rope(text_kind, text)
    config_class: Any = CONFIG_MAPPING[kind]
    return config_class(**sizes)  # type: ignore[no-any-return]


def _of_kind(config: type[PretrainedConfig], sizes: Content) -> Content:
    known = {each.name for each in fields(config)} | config.attribute_map.keys()
    return {name: size for name, size in sizes.items() if name in known}


def _rope(kind: str, sizes: Content) -> Content:
    """Sections of a tiny head for kinds whose tokens have three positions."""
    config = CONFIG_MAPPING[kind]
    if "mrope_section" not in getsource(import_module(config.__module__.replace(".configuration_", ".modeling_"))):
        return {}
    width = sizes["head_dim"] if "head_dim" in {each.name for each in fields(config)} else 64 // 8
    rope = getattr(config(), "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    return {"rope_parameters": rope | {"mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}}


def build_whole(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Save a model with random weights into `folder`; returns it as the library holds it."""
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if has_images else MODEL_FOR_MULTIMODAL_LM_MAPPING
    model = mapping[type(config)](config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.data = noise + 1 if "norm" in name and name.endswith("weight") else noise
    model.eval().requires_grad_(requires_grad=False)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def _on_top(content: Content) -> Content:
    """The fields of the text part on top, as Qwen2-VL is published."""
    text = {name: value for name, value in content.pop("text_config").items() if name != "model_type"}
    return {**text, **content}


def _as_llm(content: Content) -> Content:
    """As InternVL's own code names its parts."""
    ties = content["tie_word_embeddings"]
    return {"model_type": "internvl_chat", "llm_config": content["text_config"], "tie_word_embeddings": ties}


def _in_thinker(content: Content) -> Content:
    return {"model_type": content["model_type"].removesuffix("_thinker"), "thinker_config": content}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a kind is published: its text part's kind, if that may differ, and edits of its config and of its names."""

    kind: str
    text: str = ""
    sizes: Content = field(default_factory=dict)
    edit: Callable[[Content], Content] | None = None
    prefix: str = ""


LAYOUTS = {
    "Qwen2-VL": Layout(kind="qwen2_vl", edit=_on_top),
    "Qwen2.5-VL": Layout(kind="qwen2_5_vl", edit=_on_top),
    "Qwen3-VL": Layout(kind="qwen3_vl"),
    "Qwen3-VL-MoE": Layout(kind="qwen3_vl_moe"),
    "GLM-4V": Layout(kind="glm4v"),
    "Mistral 3": Layout(kind="mistral3"),
    "Mistral 4": Layout(kind="mistral3", text="mistral4"),
    "Gemma 3": Layout(kind="gemma3", sizes={"sliding_window": 6}),
    "LLaVA": Layout(kind="llava"),
    "Pixtral": Layout(kind="llava", text="mistral"),
    "SmolVLM": Layout(kind="smolvlm"),
    "Idefics 3": Layout(kind="idefics3"),
    "InternVL": Layout(kind="internvl"),
    "InternVL, llm_config": Layout(kind="internvl", edit=_as_llm),
    "Qwen2.5 Omni": Layout(kind="qwen2_5_omni_thinker", edit=_in_thinker, prefix="thinker."),
}
"""Gemma 3n, whose images need a package more, and Gemma 4 are built by `save_gemma`."""
WINDOWS: dict[str, Content] = {
    kind: {"sliding_window": 6} for kind in ("aya_vision", "cohere2_vision", "exaone4_5", "gemma4_unified")
}
"""Sizes of kinds whose text part always has windows."""


def save_layout(folder: Path, layout: Layout) -> PreTrainedModel:
    """Save a tiny checkpoint in this layout; returns the whole model."""
    model = build_whole(folder, tiny_whole(layout.kind, layout.text, **layout.sizes))
    if layout.edit:
        file = folder / CONFIG_FILE
        file.write_text(json.dumps(layout.edit(json.loads(file.read_text()))))
    if layout.prefix:
        edit_tensors(folder / "model.safetensors", lambda found: _rename(found, layout.prefix, ""))
    return model


def save_gemma(folder: Path, kind: str, **sizes: Any) -> PreTrainedModel:
    """Save the text model of a Gemma 3n or 4 as its whole model has it; returns the text model."""
    model = build_checkpoint(folder, f"{kind}_text", **sizes)
    text = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({"model_type": kind, "text_config": text}))
    edit_tensors(folder / "model.safetensors", lambda found: _rename(found, "model.language_model.", "model."))
    assert any(name.startswith("model.language_model.") for name in load_file(folder / "model.safetensors"))
    return model


def _rename(found: dict[str, Tensor], prefix: str, instead_of: str) -> None:
    renamed = {prefix + name.removeprefix(instead_of): each for name, each in found.items()}
    found.clear()
    found.update(renamed)
