"""Qwen 3: Llama with norms of queries and keys."""

from functools import partial

from llama_ssp.architectures.family import Family, windows_by_layer_type
from llama_ssp.architectures.gated import gated

FAMILY = Family(
    model_type="qwen3",
    parameters=partial(gated, has_head_norms=True),
    is_llama_kind=True,
    cuts_vocabulary=True,
    windows=windows_by_layer_type,
    mask_by_layer_type=True,
)
