"""Holds a larger shape to what the small one needs, field by field."""

import pytest

from llama_ssp import catalogue
from llama_ssp.catalogue import ModelShape
from llama_ssp.weights.expansion import obstacle
from tests.helpers.shapes import llama_shape


def tiny() -> ModelShape:
    shape = catalogue.load("tiny").shape
    assert shape
    return shape


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 9}, "num_hidden_layers is 9, and at least 10 is required"),
        ({"hidden_size": 256}, "hidden_size is 256, and at least 257 is required"),
        ({"head_dim": 16}, "head_dim is 16, and at least 32"),
        ({"intermediate_size": 1000}, "intermediate_size is 1000, and at least 1024"),
        ({"vocab_size": 4000}, "vocab_size is 4000, and at least 4096"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, and at least 4"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_key_value_heads is 6, and at least 8"),
        ({"tie_word_embeddings": True}, "its embeddings are tied"),
    ],
)
def test_what_stands_in_the_way_is_named(changes: dict[str, int], reason: str) -> None:
    assert reason in (obstacle(tiny(), llama_shape(**changes)) or "")
