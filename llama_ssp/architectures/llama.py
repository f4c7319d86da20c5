"""Llama, and models stored as Llama: TinyLlama, SmolLM2."""

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.gated import gated

FAMILY = Family(model_type="llama", parameters=gated, is_llama_kind=True, cuts_vocabulary=True)
