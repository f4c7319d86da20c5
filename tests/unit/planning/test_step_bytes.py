"""Bytes that a forward reads, counted by hand."""

from dataclasses import replace

from llama_ssp.architectures.family import inventory
from llama_ssp.planning.memory import step_bytes
from llama_ssp.planning.spec import planned_model
from llama_ssp.settings import catalogue
from llama_ssp.settings.schema import Dtype, ModelShape

SHAPE = ModelShape(
    model_type="llama", num_hidden_layers=3, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    intermediate_size=1024, vocab_size=1000, max_position_embeddings=64,
)  # fmt: skip
MATRICES = 3 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 1024 * 512)
HEAD = 1000 * 512
NORMS = 3 * 2 * 512 + 512


def of(shape: ModelShape, **fields: Dtype) -> int:
    entry = replace(catalogue.load("tiny"), shape=shape, **fields)  # type: ignore[arg-type]
    model = planned_model(entry, device="cpu")
    return step_bytes(inventory(shape), model, device="cpu")


def test_a_forward_reads_all_matrices_and_no_embedding() -> None:
    assert of(SHAPE, dtype=Dtype.fp32, stored_dtype=Dtype.fp32) == 4 * (MATRICES + HEAD + NORMS)
    assert of(SHAPE, dtype=Dtype.bf16) == 2 * (MATRICES + HEAD + NORMS)


def test_a_head_that_is_the_embedding_is_read() -> None:
    tied = replace(SHAPE, tie_word_embeddings=True)
    assert of(tied, dtype=Dtype.fp32, stored_dtype=Dtype.fp32) == 4 * (MATRICES + HEAD + NORMS)


def test_weights_of_a_16_bit_file_are_read_in_16_bits() -> None:
    for shape in (SHAPE, replace(SHAPE, tie_word_embeddings=True)):
        assert of(shape, dtype=Dtype.fp32, stored_dtype=Dtype.bf16) == 2 * (MATRICES + HEAD) + 4 * NORMS
