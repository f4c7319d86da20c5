"""Llama and its kind, with TinyLlama and SmolLM2, which are stored as Llama: families that the lean decoder runs."""

from dataclasses import replace
from functools import partial

from llama_ssp.architectures.family import Family, windows_of_layers
from llama_ssp.architectures.matrices import ATTENTION, GATED, decoder

QKV = ("q_proj", "k_proj", "v_proj")

LLAMA = Family(
    model_type="llama",
    parameters=decoder,
    is_llama_kind=True,
    cuts_vocabulary=True,
    biased_by={"attention_bias": ATTENTION, "mlp_bias": GATED},
)
MISTRAL = replace(LLAMA, model_type="mistral", windows=windows_of_layers, biased_by={})
QWEN2 = replace(MISTRAL, model_type="qwen2", parameters=partial(decoder, biased=QKV))
QWEN3 = replace(
    MISTRAL,
    model_type="qwen3",
    parameters=partial(decoder, head_norms=2),
    norms_heads=True,
    biased_by={"attention_bias": ATTENTION},
)
SEED_OSS = replace(
    QWEN2,
    model_type="seed_oss",
    windows=None,
    biased_by={"attention_bias": QKV, "attention_out_bias": ("o_proj",), "mlp_bias": GATED},
)
MINISTRAL = replace(MISTRAL, model_type="ministral")
CWM = replace(MISTRAL, model_type="cwm", biased_by={"mlp_bias": GATED})
PHI3 = replace(
    MISTRAL, model_type="phi3", parameters=partial(decoder, modules=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
)
