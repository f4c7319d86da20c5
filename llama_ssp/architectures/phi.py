"""Phi 1, 1.5 and 2: attention and MLP share one layer norm, biases everywhere."""

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import Inventory, inventory_of
from llama_ssp.settings.schema import ModelShape


def _parameters(shape: ModelShape) -> Inventory:
    width, units, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    layer = {
        "q_proj": (queries, 0), "k_proj": (keys, 0), "v_proj": (keys, 0), "fc1": (units, 0), "dense": (queries, 1),
        "fc2": (units, 1),
    }  # fmt: skip
    biased = (*layer, "lm_head")
    return inventory_of(shape, layer, biased=biased, layer_vectors=2 * width, final_vectors=2 * width)


FAMILY = Family(model_type="phi", parameters=_parameters, cuts_vocabulary=True)
