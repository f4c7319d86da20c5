"""Gemma 1: the embedding scales its output."""

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.gated import gated

FAMILY = Family(
    model_type="gemma", parameters=gated, ties_unless_said=True, cuts_vocabulary=True, cuts_own_embedding=True
)
