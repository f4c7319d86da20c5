"""Phi 1, 1.5 and 2: attention and MLP share one layer norm, biases everywhere."""

from functools import partial

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import decoder

_LAYER = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")

FAMILY = Family(
    model_type="phi",
    parameters=partial(decoder, modules=_LAYER, biased=(*_LAYER, "lm_head"), norms=2, final_norms=2),
    cuts_vocabulary=True,
)
