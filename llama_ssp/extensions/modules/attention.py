"""Attentions that this package adds to transformers: softcapped, to latents, tempered; and each position by position.

Shapes: B sequences, T positions, H query heads, N key-value heads, G query heads of each, Q = T * G queries, S slots,
D head dim.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llama_ssp.extensions.modules.latents import LATENT, attend_latents
from llama_ssp.models.attention import attend_by_position
from llama_ssp.types import LibraryPart

Form = Callable[..., tuple[Tensor, None]]

SOFTCAPPED = "softcapped"
"""The name under which transformers knows `_softcapped`."""
TEMPERED = "tempered"
"""The name under which transformers knows `_tempered`."""
BY_POSITION = {name: f"{name}_by_position" for name in ("sdpa", SOFTCAPPED, LATENT, TEMPERED)}
"""Name of the position-by-position variant, by the name of the attention."""


def _softcapped(
    module: LibraryPart,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    **_options: object,
) -> tuple[Tensor, None]:
    """Attention with softcapped scores, as the eager attention of transformers; returns (B, T, H, D).

    The queries of a group are folded into rows, so that keys and values are never expanded.

    Source: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    group: int = module.num_key_value_groups
    queries_BNQD = query.unflatten(1, (-1, group)).flatten(2, 3)
    scores_BNQS = queries_BNQD @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores_BNQS = torch.tanh(scores_BNQS / softcap) * softcap
    scores_BNQS += attention_mask.repeat(1, 1, group, 1)
    weights_BNQS = scores_BNQS.softmax(-1, dtype=torch.float32).to(value.dtype)
    attended_BHTD = (weights_BNQS @ value).unflatten(2, (group, -1)).flatten(1, 2)
    return attended_BHTD.transpose(1, 2).contiguous(), None


def _tempered(
    form: Form, module: nn.Module, query: Tensor, *others: Tensor, scales_BT: Tensor | None = None, **options: object
) -> tuple[Tensor, None]:
    """Attention whose queries (B, H, T, D) are multiplied by a number of their position; returns (B, T, H, D)."""
    if scales_BT is not None:
        query = (query * scales_BT[:, None, :, None]).to(query.dtype)
    return form(module, query, *others, **options)


def _one_by_one(form: Form) -> Form:
    """The position-by-position variant of an attention of transformers; it returns (B, T, H, D)."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
    ) -> tuple[Tensor, None]:
        if attention_mask is None:  # of a whole text without a cache, with which ours is compared
            return form(module, query, key, value, attention_mask, **options)

        def attend(queries: Tensor, mask: Tensor) -> Tensor:
            return form(module, queries, key, value, mask, **options)[0].transpose(1, 2)

        return attend_by_position(attend, query, attention_mask).transpose(1, 2).contiguous(), None

    return forward


_FORMS: dict[str, Form] = {
    SOFTCAPPED: _softcapped,
    LATENT: attend_latents,
    BY_POSITION["sdpa"]: _one_by_one(sdpa_attention_forward),
    BY_POSITION[SOFTCAPPED]: _one_by_one(_softcapped),
    BY_POSITION[LATENT]: _one_by_one(attend_latents),
    TEMPERED: partial(_tempered, sdpa_attention_forward),
    BY_POSITION[TEMPERED]: partial(_tempered, _one_by_one(sdpa_attention_forward)),
}
for _name, _form in _FORMS.items():
    AttentionInterface.register(_name, _form)
    AttentionMaskInterface.register(_name, sdpa_mask)


def use_softcapped(model: PreTrainedModel) -> None:
    """Make a model use softcapped attention."""
    model.config._attn_implementation = SOFTCAPPED
