"""Adapts models of transformers by the records of their families: windows, masks, attention.

A sliding window is part of the mask: the cache keeps every slot, and slots that are too old for a layer are masked.

Shapes: B sequences, T positions, S slots, L layers; H query heads, D head dim, W windows.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from llama_ssp.architectures.family import record_of
from llama_ssp.errors import CheckpointError
from llama_ssp.extensions.modules.latents import use_latents
from llama_ssp.extensions.modules.records.decoders import GPT_NEO
from llama_ssp.registry import imported
from llama_ssp.types import LibraryPart
from llama_ssp.weights.source import WeightSource


def adapt(model: PreTrainedModel) -> None:
    """Apply the family's changes to the modules of transformers, before weights are matched.

    Rotary frequencies stay as at the first positions (`family.num_positions`): otherwise every forward would look for
    the largest position, and some would change the frequencies of all rows.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # of all layers, or by type of layer
        if kinds is not None:
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
        if hasattr(module, "zero_expert_num"):  # of LongCat-Flash: some experts have no weights
            module.num_experts = module.total_experts  # a fact of the library's module
    use_latents(model)
    if path := record_of(model.config.model_type).adapt:
        imported(path, setting=model.config.model_type)(model)


def mask_argument(config: PretrainedConfig, masks: Mapping[int | None, Tensor]) -> Tensor | dict[str, Tensor | None]:
    """The attention mask argument of a model of transformers, from the masks (B, 1, T, S) of its layers' windows."""
    if len(masks) > 1 and (kinds := getattr(config, "layer_types", None)):
        record = record_of(config.model_type)
        windows = zip(kinds, record.windows_of(config), strict=True)
        return {kind: masks[window] for kind, window in windows if kind not in record.recurrent}
    return next(iter(masks.values())) if len(masks) == 1 else torch.cat([*masks.values()], 1)


def check_gpt_neo(origin: WeightSource) -> None:
    """CheckpointError if another number of positions is stored, before a model allocates masks of that size squared."""
    wanted: int = origin.config.max_position_embeddings
    for name, tensor in origin.tensors.items():
        if name.endswith("wpe.weight") and tensor.shape[:1] != (wanted,):
            raise CheckpointError(
                f"{origin.folder} does not fit its config.json: {name} has {tensor.shape[0] if tensor.shape else 0} "
                f"rows, and config.json has max_position_embeddings={wanted}: copy or download it again"
            )


def adapt_gpt_neo(model: PreTrainedModel) -> None:
    """Make the attention of every layer take our masks, where transformers' slices its own by length."""
    windows = GPT_NEO.windows_of(model.config)
    distinct = list(dict.fromkeys(windows))
    body: Any = model.transformer
    for block, window in zip(body.h, windows, strict=True):
        attention = block.attn.attention
        attention._attn = partial(_attend, attention, distinct.index(window))
        del attention.bias  # masks of the context's size squared
    model.config._attn_implementation = "sdpa"


def _attend(module: LibraryPart, number: int, *qkv_and_masks: Tensor) -> tuple[Tensor, None]:
    """Attention (B, H, T, D) with the layer's own mask of (B, W, T, S), for any attention that transformers knows."""
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    *qkv, masks_BWTS = qkv_and_masks
    attended_BTHD, _ = attend(module, *qkv, masks_BWTS[:, number : number + 1], scaling=1.0)
    return attended_BTHD.transpose(1, 2), None


def use_linears(model: PreTrainedModel) -> None:
    """Replace linear layers of other classes: of GPT-2, whose weights `Family.turned` turns, and of Falcon."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(module.nx, module.nf, device="meta")
        elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            has_bias = module.bias is not None
            linear = nn.Linear(module.in_features, module.out_features, bias=has_bias, device="meta")
        else:
            continue
        model.set_submodule(name, linear)


def adapt_gpt_neox_japanese(model: PreTrainedModel) -> None:
    """Give every layer's attention copies of keys and values, which it views in another shape."""
    body: Any = model.get_decoder()
    for layer in body.layers:
        attend = layer.attention._attn
        layer.attention._attn = lambda q, k, v, mask, attend=attend: attend(q, k.contiguous(), v.contiguous(), mask)
