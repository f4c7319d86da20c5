"""Holds the parts of the recipe to what the whole relies on: shares, what fits, and gathers."""

import pytest
import torch

from llama_ssp import catalogue
from llama_ssp.catalogue import ModelShape
from llama_ssp.weights.expansion import SPARE, Gather, cancelling, obstacle, shares
from tests.helpers.shapes import llama_shape


def is_power_of_two(value: float) -> bool:
    return float(torch.tensor(value).abs().frexp().mantissa) == 0.5


@pytest.mark.parametrize("count", range(1, 40))
def test_shares_add_up_to_one_and_cancelling_weights_to_zero_only_all_together(count: int) -> None:
    weights = cancelling(count)
    assert len(shares(count)) == len(weights) == count
    assert all(map(is_power_of_two, shares(count) + weights * (count > 1)))
    assert sum(shares(count)) == 1
    runs = {(start, stop): sum(weights[start:stop]) for stop in range(1, count + 1) for start in range(stop)}
    assert [run for run, total in runs.items() if total == 0] == [(0, count)]


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


SMALL = torch.arange(1.0, 13.0).view(3, 4)
GATHER = Gather(
    source="",
    rows_O=torch.tensor([2, 0, SPARE, 0, SPARE]),
    columns_I=torch.tensor([3, SPARE, 1, 1, 0]),
    weights_I=torch.tensor([1.0, 2.0, -0.5, 0.25, 1.0]),
    scale=2.0,
)


def test_a_gather_is_what_its_definition_says() -> None:
    made = GATHER.make(SMALL, dtype=torch.float32)
    for place, row in enumerate(GATHER.rows_O):
        for column, source in enumerate(GATHER.columns_I):
            is_spare = SPARE in {int(row), int(source)}
            assert GATHER.weights_I is not None
            wanted = 0.0 if is_spare else 2 * SMALL[row, source] * GATHER.weights_I[column]
            assert made[place, column] == wanted


def test_the_last_column_tells_taken_rows_from_spare_ones() -> None:
    gather = Gather(
        source="", rows_O=GATHER.rows_O, columns_I=torch.tensor([1, SPARE]), scale=2.0, last_column=(7.0, -3.0)
    )
    made = gather.make(SMALL, dtype=torch.bfloat16)
    assert made.dtype is torch.bfloat16
    assert made.tolist() == [[20, 7], [4, 7], [0, -3], [4, 7], [0, -3]]
