"""Parameters of Llama, Gemma and similar models: grouped-query attention, gated MLP, RMS norms."""

from llama_ssp.architectures.inventory import Inventory, inventory_of
from llama_ssp.settings.schema import ModelShape


def gated(
    shape: ModelShape, *, has_qkv_bias: bool = False, norms_per_layer: int = 2, has_head_norms: bool = False
) -> Inventory:
    """List the parameters of a model; `has_head_norms` means norms of queries and keys over the head dim."""
    units, dim = shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    return inventory_of(
        shape,
        {
            "q_proj": (queries, 0), "k_proj": (keys, 0), "v_proj": (keys, 0), "o_proj": (queries, 1),
            "gate_proj": (units, 0), "up_proj": (units, 0), "down_proj": (units, 1),
        },
        biased=("q_proj", "k_proj", "v_proj") if has_qkv_bias else (),
        layer_vectors=norms_per_layer * shape.hidden_size + 2 * dim * has_head_norms,
        final_vectors=shape.hidden_size,
    )  # fmt: skip
