"""Gemma 1, 2, and the text model of 3: the embedding scales its output; the later ones have sliding windows."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.family import Family, windows_by_layer_type
from llama_ssp.architectures.matrices import gated

GEMMA = Family(
    model_type="gemma", parameters=gated, ties_unless_said=True, cuts_vocabulary=True, cuts_own_embedding=True
)
GEMMA3 = replace(
    GEMMA,
    model_type="gemma3_text",
    parameters=partial(gated, norms_per_layer=4, has_head_norms=True),
    windows=windows_by_layer_type,
    mask_by_layer_type=True,
    num_masks=2,
)
GEMMA2 = replace(
    GEMMA3,
    model_type="gemma2",
    parameters=partial(gated, norms_per_layer=4),
    attention="eager",  # softcapped scores
    keeps_scores=True,
    adapt="llama_ssp.models.attention:use_softcapped",
)
