"""Llama shapes that are larger than the shipped models and small enough for a test, each different in another way."""

from typing import Any

from llama_ssp.catalogue import ModelShape


def llama_shape(**changes: object) -> ModelShape:
    """A shape that holds `tiny` with more of everything."""
    wide: dict[str, Any] = {
        "num_hidden_layers": 13,
        "hidden_size": 640,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2600,
        "vocab_size": 5000,
        "max_position_embeddings": 4096,
    }
    return ModelShape(model_type="llama", **wide | changes)


SHAPES = {
    "more of everything": llama_shape(),
    "no groups": llama_shape(num_attention_heads=10, num_key_value_heads=10, hidden_size=1280, head_dim=128),
    "larger groups": llama_shape(num_attention_heads=32, num_key_value_heads=4, hidden_size=1024, head_dim=32),
    "head dim not a multiple": llama_shape(num_attention_heads=12, num_key_value_heads=4, hidden_size=768, head_dim=48),
    "hardly room": llama_shape(
        num_hidden_layers=10,
        hidden_size=264,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=1024,
        vocab_size=4097,
    ),
    "the same vocabulary": llama_shape(vocab_size=4096),
    "tied": llama_shape(tie_word_embeddings=True),
    "too few key-value heads for tiny": llama_shape(num_attention_heads=9, num_key_value_heads=3, hidden_size=576),
}
