"""GPT-NeoX: fused query-key-value matrix, plain MLP, layer norms; every rank holds the whole embedding."""

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.gated import head_of
from llama_ssp.architectures.inventory import Inventory, Matrix
from llama_ssp.settings.schema import ModelShape


def _parameters(shape: ModelShape) -> Inventory:
    width, units = shape.hidden_size, shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    return Inventory(
        layer=(
            Matrix(module="query_key_value", num_rows=3 * queries, num_columns=width, cut=0, has_bias=True),
            Matrix(module="dense", num_rows=width, num_columns=queries, cut=1, has_bias=True),
            Matrix(module="dense_h_to_4h", num_rows=units, num_columns=width, cut=0, has_bias=True),
            Matrix(module="dense_4h_to_h", num_rows=width, num_columns=units, cut=1, has_bias=True),
        ),
        layer_vectors=4 * width,
        embeddings=(Matrix(module="embed_in", num_rows=shape.vocab_size, num_columns=width),),
        head=head_of(shape),
        final_vectors=2 * width,
        num_layers=shape.num_hidden_layers,
    )


FAMILY = Family(model_type="gpt_neox", parameters=_parameters)
