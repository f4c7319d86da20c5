"""Attention to latents: queries are taken into the space of the latents, so that no key or value is made of the cache.

The keys and values of a head h are products of a token's latent c, and its rotary key r is the same for all heads:

    in the cache   | c: R numbers | r: P numbers |
    key            [K_h c, r]      so    score    (K_h^T q_h) . c + q'_h . r      q_h, q'_h: the two parts of a query
    value          V_h c           so    output   V_h (sum over slots of the probability times c)

A long chunk of a prompt makes keys and values of its slots, which is then less arithmetic (`engine.expands_latents`).
Every family of transformers has one method for that, `expand_kv`, by which such an attention is recognized. What stands
between the products with K and V is an operator of the device (`kernels.latents`).

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2.

Shapes: B sequences, T positions, H heads, D width of a key, S slots, R numbers of a latent, P of a rotary key, N of a
key without it, V of a value, M = B * T tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llama_ssp.architectures.engine import expands_latents
from llama_ssp.kernels.latents import find_attention
from llama_ssp.kernels.linear import Kernel
from llama_ssp.kernels.parts import KeptRows
from llama_ssp.types import LibraryPart

LATENT = "latent"
"""The name under which transformers knows `attend_latents`."""
_PROJECTION = "kv_b_proj"


def attend_latents(
    module: LibraryPart,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend with queries (B, H, T, D) to latents (B, 1, S, R) and rotary keys (B, 1, S, P); returns (B, T, H, V).

    With a mask of numbers, both are as the cache keeps them. Of a whole text without a cache, with which ours is
    compared, transformers makes a mask of booleans, or none.
    """
    num_heads, num_positions = query.shape[1:3]
    of_key, of_value, rank = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
    is_kept = attention_mask is not None and attention_mask.dtype is not torch.bool
    if not is_kept or expands_latents(num_positions, rank=rank, made=of_key + of_value):
        if is_kept:
            key, value = (module.kept_latents.unpack(rows, query.dtype) for rows in (key, value))
        keys, values = type(module).expand_kv(module, key, value)
        attended, _ = sdpa_attention_forward(
            module,
            query,
            keys,
            values,
            attention_mask,
            scaling=scaling,
            **options,  # type: ignore[arg-type]
        )
        return attended, None
    made_HOR: Tensor = getattr(module, _PROJECTION).weight.view(num_heads, of_key + of_value, rank)
    keys_HNR, values_HVR = made_HOR.split([of_key, of_value], 1)
    plain_BHTN, rotated_BHTP = query.split([of_key, query.shape[-1] - of_key], -1)

    def by_heads(x_BHTX: Tensor, matrices_HXY: Tensor) -> Tensor:
        x_HMY = x_BHTX.transpose(0, 1).flatten(1, 2) @ matrices_HXY
        x_HBTY: Tensor = x_HMY.unflatten(1, (-1, num_positions))
        return x_HBTY.transpose(0, 1)

    queries_BHTD = torch.cat([by_heads(plain_BHTN, keys_HNR), rotated_BHTP], -1)
    attended_BHTR = module.attend(queries_BHTD, key[:, 0], value[:, 0], attention_mask, scaling)
    return by_heads(attended_BHTR, values_HVR.transpose(1, 2)).transpose(1, 2), None


def attend_kept(model: PreTrainedModel, kept: KeptRows) -> list[int]:
    """Let attention that `use_latents` has changed read latents as a cache keeps them; returns the layers."""
    found = []
    for _, module in _attentions(model):
        if module.expand_kv is _unchanged:
            weight_OR = getattr(module, _PROJECTION).weight
            num_heads = len(weight_OR) // (module.qk_nope_head_dim + module.v_head_dim)
            sizes = {"num_heads": num_heads, "rank": module.kv_lora_rank, "rotary": module.qk_rope_head_dim}
            module.kept_latents = kept
            module.attend = find_attention(weight_OR.device, **sizes, kept=kept, dtype=weight_OR.dtype)
            found.append(module.layer_idx)
    return found


def use_latents(model: PreTrainedModel) -> None:
    """Make the attention of a model read latents, if it has such a one; no-op for other models."""
    for _, attention in _attentions(model):
        attention.expand_kv = _unchanged
        attention.config._attn_implementation = LATENT


def _unchanged(latents_B1SR: Tensor, rotary_B1SP: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for `expand_kv`: attention gets what the cache holds."""
    return latents_B1SR, rotary_B1SP


def _attentions(model: nn.Module) -> Iterator[tuple[str, LibraryPart]]:
    for name, module in model.named_modules():
        projection = getattr(module, _PROJECTION, None)
        if hasattr(type(module), "expand_kv") and projection is not None and projection.bias is None:
            yield name, module


def projections(model: nn.Module) -> dict[str, int]:
    """Name the linear layers whose weights attention reads as they are, so that none is packed; with their inputs."""
    return {f"{name}.{_PROJECTION}": module.kv_lora_rank for name, module in _attentions(model)}


def unpack(module: LibraryPart, kernel: Kernel, *, num_inputs: int, dtype: torch.dtype) -> nn.Module:
    """Give a filled linear layer its weight in `dtype`, if that is packed: it is multiplied by the identity."""
    if module.weight.dtype is torch.uint8:
        one_II = torch.eye(num_inputs, dtype=dtype, device=module.weight.device)
        weight_OI = kernel(module.weight.detach(), None)(one_II).t().contiguous()
        module.register_parameter("weight", nn.Parameter(weight_OI, requires_grad=False))
    return module  # type: ignore[no-any-return]
