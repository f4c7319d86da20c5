"""Llama and its kind: TinyLlama and SmolLM2, stored as Llama, Mistral, Qwen 2, 2.5 and 3."""

from dataclasses import replace
from functools import partial
from typing import Any

from llama_ssp.architectures.family import Family, windows_by_layer_type
from llama_ssp.architectures.matrices import gated


def _in_all_layers(config: Any) -> tuple[int | None, ...]:  # noqa: ANN401 - the library's config
    return (config.sliding_window,) * int(config.num_hidden_layers)


LLAMA = Family(model_type="llama", parameters=gated, is_llama_kind=True, cuts_vocabulary=True)
MISTRAL = replace(LLAMA, model_type="mistral", windows=_in_all_layers)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    parameters=partial(gated, has_qkv_bias=True),
    windows=windows_by_layer_type,
    mask_by_layer_type=True,
)
QWEN3 = replace(QWEN2, model_type="qwen3", parameters=partial(gated, has_head_norms=True))
