"""Llama and its kind: TinyLlama and SmolLM2, stored as Llama, Mistral, Qwen 2, 2.5 and 3."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.family import Family, windows_of_layers
from llama_ssp.architectures.matrices import ATTENTION, GATED, decoder

QKV = ("q_proj", "k_proj", "v_proj")

LLAMA = Family(
    model_type="llama", parameters=decoder, is_llama_kind=True, cuts_vocabulary=True,
    biased_by={"attention_bias": ATTENTION, "mlp_bias": GATED},
)  # fmt: skip
MISTRAL = replace(LLAMA, model_type="mistral", windows=windows_of_layers, biased_by={})
QWEN2 = replace(MISTRAL, model_type="qwen2", parameters=partial(decoder, biased=QKV))
QWEN3 = replace(
    MISTRAL, model_type="qwen3", parameters=partial(decoder, head_norms=2), norms_heads=True,
    biased_by={"attention_bias": ATTENTION},
)  # fmt: skip
