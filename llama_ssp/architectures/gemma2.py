"""Gemma 2: four norms per layer, softcapped scores, sliding windows in every other layer."""

from functools import partial

from llama_ssp.architectures.family import Family, windows_by_layer_type
from llama_ssp.architectures.gated import gated

FAMILY = Family(
    model_type="gemma2",
    parameters=partial(gated, norms_per_layer=4),
    windows=windows_by_layer_type,
    mask_by_layer_type=True,
    num_masks=2,
    attention="eager",
    keeps_scores=True,
    ties_unless_said=True,
    cuts_vocabulary=True,
    cuts_own_embedding=True,
    adapt="llama_ssp.models.attention:use_softcapped",
)
