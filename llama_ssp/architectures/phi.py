"""Phi 1, 1.5 and 2: attention and MLP share one layer norm, biases everywhere."""

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.gated import head_of
from llama_ssp.architectures.inventory import Inventory, Matrix
from llama_ssp.settings.schema import ModelShape


def _parameters(shape: ModelShape) -> Inventory:
    width, units, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    columns = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "fc1": units}
    rows = {"dense": queries, "fc2": units}
    return Inventory(
        layer=(
            *(Matrix(module=m, num_rows=n, num_columns=width, cut=0, has_bias=True) for m, n in columns.items()),
            *(Matrix(module=m, num_rows=width, num_columns=n, cut=1, has_bias=True) for m, n in rows.items()),
        ),
        layer_vectors=2 * width,
        embeddings=(Matrix(module="embed_tokens", num_rows=shape.vocab_size, num_columns=width, cut=0),),
        head=head_of(shape, has_bias=True),
        final_vectors=2 * width,
        num_layers=shape.num_hidden_layers,
    )


FAMILY = Family(model_type="phi", parameters=_parameters, cuts_vocabulary=True)
