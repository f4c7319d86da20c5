"""How many kernels rounds have at true sizes, and whether attention has a thread block for each multiprocessor.

The page `docs/guides/gpus.md` shows these numbers.
"""

import json
from typing import Any

import pytest
from tests.stub_gpu.process import Stub

from tests.helpers.repository import ROOT

MOST_OF_A_ROUND = 1400
MOST_OF_A_LAYER, MOST_OF_A_RANK_S_LAYER = 8, 10
MOST_OF_A_DRAW = 8
LEAST_BLOCKS = 128


@pytest.fixture(scope="module")
def found(stub: Stub) -> dict[str, Any]:
    """What `counts` printed."""
    printed: dict[str, Any] = json.loads(stub.run("-m", "tests.stub_gpu.counts", timeout_s=550).splitlines()[-1])
    return printed


def test_a_round_of_30b_and_7b_has_few_kernels(found: dict[str, Any]) -> None:
    assert found["round"] <= MOST_OF_A_ROUND


def test_a_layer_has_few_kernels(found: dict[str, Any]) -> None:
    assert sum(found["layer"].values()) <= MOST_OF_A_LAYER
    assert sum(found["layer of a rank"].values()) <= MOST_OF_A_RANK_S_LAYER


def test_drawing_a_sampled_token_takes_few_kernels(found: dict[str, Any]) -> None:
    assert found["draws"]["sampled"] <= MOST_OF_A_DRAW


def test_attention_keeps_all_multiprocessors_busy(found: dict[str, Any]) -> None:
    assert {name: blocks for name, blocks in found["blocks"].items() if blocks < LEAST_BLOCKS} == {}


def test_the_page_shows_the_numbers(found: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "guides" / "gpus.md").read_text()
    rows = {
        "a round of 30B with 7B, K = 4": found["round"],
        "a layer": sum(found["layer"].values()),
        "a layer with tensor parallelism": sum(found["layer of a rank"].values()),
        **{f"a draw, {name}": number for name, number in found["draws"].items()},
    }
    assert [f"| {name} | {number} |" for name, number in rows.items() if f"| {name} | {number} |" not in page] == []
