"""GPT-NeoX: fused query-key-value matrix, plain MLP, layer norms; every rank holds the whole embedding."""

from llama_ssp.architectures.family import Family
from llama_ssp.architectures.matrices import Inventory, Matrix, inventory_of
from llama_ssp.catalogue import ModelShape


def _parameters(shape: ModelShape) -> Inventory:
    width, units, queries = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads * shape.head_dim
    layer = {
        "query_key_value": (3 * queries, 0), "dense": (queries, 1), "dense_h_to_4h": (units, 0),
        "dense_4h_to_h": (units, 1),
    }  # fmt: skip
    embedding = Matrix(module="embed_in", num_rows=shape.vocab_size, num_columns=width)
    return inventory_of(
        shape, layer, biased=layer, layer_vectors=4 * width, embeddings=(embedding,), final_vectors=2 * width
    )


FAMILY = Family(model_type="gpt_neox", parameters=_parameters)
