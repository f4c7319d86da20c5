"""Tiny checkpoints of models that read images or audio too, in the layouts in which they are published."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
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
from llama_ssp.models.loading import check_model
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.engine.state import Request
from llama_ssp.weights.checkpoint import inspect
from tests.helpers.decoders import complete, make_decoder
from tests.helpers.edits import edit_tensors
from tests.helpers.fake_comm import on_ranks, thread_comms
from tests.helpers.library_kinds import fitting, tiny_sizes
from tests.helpers.models import FAMILIES, SIZES, build_checkpoint, load_ranks
from tests.helpers.texts import part_at_a_near_tie, read_greedy

Content = dict[str, Any]
PROMPTS = ((5, 3, 4), tuple(range(2, 30)))
NUM_TOKENS = 8
_IMAGES: Content = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers", "num_global_layers", "encoder_layers"), 1),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "intermediate_size", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 2),
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    **dict.fromkeys(("out_hidden_size", "output_dim"), SIZES["hidden_size"]),
    "image_size": 28,
    "patch_size": 14,
    "head_dim": 16,
    "vocab_size": SIZES["vocab_size"],
}
CHUNKS: Content = {
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 160,
    "num_experts_per_tok": 1,
}
"""Sizes of a Llama 4 whose texts go over the borders of chunks and of temperatures."""
_UNSET = ("sliding_window",)
"""A field of text models that some of their configurations have without effect."""


def tiny_whole(kind: str, text_kind: str = "", **changes: object) -> PretrainedConfig:
    """The configuration of a model whose text part, of another kind if given, has tiny sizes, and `changes`."""
    base = CONFIG_MAPPING[kind]()
    parts = {name: each for name, each in vars(base).items() if isinstance(each, PretrainedConfig)}
    sizes = {name: fitting(type(part), _IMAGES) | {"model_type": part.model_type} for name, part in parts.items()}
    text_kind = text_kind or base.get_text_config().model_type
    text = {**SIZES, **tiny_sizes(text_kind), "pad_token_id": 0, **dict.fromkeys(_UNSET), **changes}
    of_text = fitting(CONFIG_MAPPING[text_kind], text)
    sizes["text_config"] = of_text | {"model_type": text_kind}
    config_class: Any = CONFIG_MAPPING[kind]
    return config_class(**sizes)  # type: ignore[no-any-return]


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
    "Llama 4": Layout(kind="llama4", sizes=CHUNKS),
    "InternVL, llm_config": Layout(kind="internvl", edit=_as_llm),
    "Qwen2.5 Omni": Layout(kind="qwen2_5_omni_thinker", edit=_in_thinker, prefix="thinker."),
}
"""Gemma 3n, whose images need a package more, and Gemma 4 are built by `save_gemma`."""
WINDOWS: dict[str, Content] = {
    "llama4": CHUNKS,
    **{
        kind: {"sliding_window": 6}
        for kind in ("aya_vision", "cohere2_vision", "exaone4_5", "gemma3", "gemma4_unified")
    },
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


BY_TEXT_MODEL = ("gemma3n", "gemma4")
_GEMMA: Content = FAMILIES["gemma4_text"] | {"intermediate_size": 160, "num_hidden_layers": 4}


def save_kind(folder: Path, kind: str) -> PreTrainedModel:
    """Save a tiny checkpoint of a kind as the library does; returns the whole model, or the text model of Gemmas."""
    if kind in BY_TEXT_MODEL:
        return save_gemma(folder, kind, **_GEMMA)
    return save_layout(folder, Layout(kind=kind, sizes=WINDOWS.get(kind, {})))


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


def compare_texts(folder: Path, model: Any, *, num_ranks: int) -> None:
    """Compare texts on ranks, with rejected and accepted drafts, with those of the whole model."""
    check_model(inspect(folder), num_ranks=num_ranks)
    comms = thread_comms(num_ranks)
    targets: list[Any] = load_ranks(folder, comms)
    requests = [Request(index=place, prompt_ids=ids, max_new_tokens=NUM_TOKENS) for place, ids in enumerate(PROMPTS)]

    def texts(comm: Comm) -> list[list[int]]:
        decoder = make_decoder(targets[comm.rank], None, ngram=True, batch_size=2, comm=comm)
        return [done.token_ids for done in complete(decoder, requests)]

    wanted = [read_greedy(model, prompt, num_tokens=NUM_TOKENS) for prompt in PROMPTS]
    for found in on_ranks(comms, texts):
        for prompt, own, ids in zip(PROMPTS, wanted, found, strict=True):
            part_at_a_near_tie(model, prompt, own, ids[: len(own)])
