"""Qwen 2 and 2.5: Llama with biases for queries, keys and values."""

from functools import partial

from llama_ssp.architectures.family import Family, windows_by_layer_type
from llama_ssp.architectures.gated import gated

FAMILY = Family(
    model_type="qwen2",
    parameters=partial(gated, has_qkv_bias=True),
    is_llama_kind=True,
    cuts_vocabulary=True,
    windows=windows_by_layer_type,
    mask_by_layer_type=True,
)
