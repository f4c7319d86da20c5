"""Text model of Gemma 3: four norms per layer, norms of queries and keys, sliding windows in most layers."""

from functools import partial

from llama_ssp.architectures.family import Family, windows_by_layer_type
from llama_ssp.architectures.gated import gated

FAMILY = Family(
    model_type="gemma3_text",
    parameters=partial(gated, norms_per_layer=4, has_head_norms=True),
    windows=windows_by_layer_type,
    mask_by_layer_type=True,
    num_masks=2,
    ties_unless_said=True,
    cuts_vocabulary=True,
    cuts_own_embedding=True,
)
