"""Gemma 1, 2, and the text model of 3: the embedding scales its output; the later ones have sliding windows."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.family import Family, windows_of_layers
from llama_ssp.architectures.matrices import decoder

GEMMA = Family(
    model_type="gemma", parameters=decoder, ties_unless_said=True, cuts_vocabulary=True, cuts_own_embedding=True
)
GEMMA3 = replace(
    GEMMA,
    model_type="gemma3_text",
    parameters=partial(decoder, norms=4, head_norms=2),
    windows=windows_of_layers,
    num_masks=2,
)
GEMMA2 = replace(
    GEMMA3,
    model_type="gemma2",
    parameters=partial(decoder, norms=4),
    attention="eager",  # softcapped scores
    keeps_scores=True,
    adapt="llama_ssp.models.attention:use_softcapped",
)
