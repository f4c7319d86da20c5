"""Llama 4's text: experts that read only tokens which chose them, and a temperature by position.

transformers computes every expert of every token, most of them on zeros, and takes the positions of a temperature from
the length of its own cache.

Shapes: B sequences, T positions, M = B * T tokens, K experts that a token chose, P = M * K pairs, X experts, E the
model's width.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

from llama_ssp.extensions.modules.attention import TEMPERED
from llama_ssp.types import LibraryPart


def adapt(model: PreTrainedModel) -> None:
    """Replace the experts of every layer, and scale queries of layers without rotary positions by their own."""
    config: Any = model.config
    body: Any = model.model
    config._attn_implementation, config._experts_implementation = TEMPERED, "grouped_mm"
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.feed_forward
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.attn_temperature_tuning = False
            layer.register_forward_pre_hook(partial(_with_scales, attention), with_kwargs=True)
        if layer.is_moe_layer:
            mlp.register_module("experts", _Experts(config, mlp.experts))
            mlp.forward = partial(_mix, mlp)


def _with_scales(
    attention: LibraryPart, _layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a layer's attention the scale of each position.

    Source: arXiv:2501.19399 (scaled softmax for long texts).
    """
    steps_BT = torch.floor((options["position_ids"].float() + 1) / attention.floor_scale)
    return args, options | {"scales_BT": torch.log1p(steps_BT) * attention.attn_scale + 1}


@use_experts_implementation(is_transposed=True)
class _Experts(nn.Module):
    """The experts of a layer, with the interface of all other kinds of experts in transformers."""

    def __init__(self, _config: object, whole: LibraryPart) -> None:
        super().__init__()
        self.num_experts, self.act_fn = whole.num_experts, whole.act_fn
        self.gate_up_proj, self.down_proj = whole.gate_up_proj, whole.down_proj


def _mix(mlp: LibraryPart, x_BTE: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the shared expert and chosen ones, whose inputs are multiplied by a sigmoid; (M, E), and logits (M, X)."""
    x_ME = x_BTE.reshape(-1, x_BTE.shape[-1])
    _, logits_MX = mlp.router(x_ME)
    top_MK, chosen_MK = logits_MX.topk(mlp.top_k, dim=1)
    weights_MK = top_MK.float().sigmoid().to(x_ME.dtype)
    scaled_PE = (x_ME[:, None] * weights_MK[..., None]).flatten(0, 1)
    y_PE = mlp.experts(scaled_PE, chosen_MK.reshape(-1, 1), torch.ones_like(weights_MK).reshape(-1, 1))
    return mlp.shared_expert(x_ME) + y_PE.unflatten(0, chosen_MK.shape).sum(1), logits_MX
