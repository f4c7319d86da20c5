"""Parameters of Llama, Gemma and similar models: grouped-query attention, gated MLP, RMS norms."""

from llama_ssp.architectures.inventory import Inventory, Matrix
from llama_ssp.settings.schema import ModelShape


def gated(
    shape: ModelShape, *, has_qkv_bias: bool = False, norms_per_layer: int = 2, has_head_norms: bool = False
) -> Inventory:
    """List the parameters of a model; `has_head_norms` means norms of queries and keys over the head dim."""
    width, units, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * dim, shape.num_key_value_heads * dim
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return Inventory(
        layer=(
            *(
                Matrix(module=name, num_rows=rows, num_columns=width, cut=0, has_bias=has_qkv_bias)
                for name, rows in projections.items()
            ),
            Matrix(module="o_proj", num_rows=width, num_columns=queries, cut=1),
            Matrix(module="gate_proj", num_rows=units, num_columns=width, cut=0),
            Matrix(module="up_proj", num_rows=units, num_columns=width, cut=0),
            Matrix(module="down_proj", num_rows=width, num_columns=units, cut=1),
        ),
        layer_vectors=norms_per_layer * width + 2 * dim * has_head_norms,
        embeddings=(Matrix(module="embed_tokens", num_rows=shape.vocab_size, num_columns=width, cut=0),),
        head=head_of(shape),
        final_vectors=width,
        num_layers=shape.num_hidden_layers,
    )


def head_of(shape: ModelShape, *, has_bias: bool = False) -> Matrix | None:
    """The output matrix; None if it is tied to the embedding."""
    if shape.tie_word_embeddings:
        return None
    rows, columns = shape.vocab_size, shape.hidden_size
    return Matrix(module="lm_head", num_rows=rows, num_columns=columns, cut=0, has_bias=has_bias)
