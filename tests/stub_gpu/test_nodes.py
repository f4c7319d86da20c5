"""Graphs keep to the budgets of `benchmarks.gpu_budgets`, and the page of the docs has today's counts."""

import pytest

from benchmarks.gpu_budgets import ATTENTION, DRAWS, LAYERS, ROUNDS, Attention, Draw, Layer, Round
from benchmarks.gpu_nodes import PAGE, Counts, count, document
from tests.stub_gpu.process import Stub


@pytest.fixture(scope="module")
def counts(stub: Stub) -> Counts:
    """All counts of `benchmarks.gpu_nodes`."""
    return count(stub)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_a_layer_keeps_to_its_budget(counts: Counts, case: Layer) -> None:
    assert 0 < sum(counts["layers"][case.name].values()) <= case.most, counts["layers"][case.name]


@pytest.mark.parametrize("case", DRAWS, ids=lambda case: case.name)
def test_a_draw_keeps_to_its_budget(counts: Counts, case: Draw) -> None:
    assert 0 < sum(counts["draws"][case.name].values()) <= case.most, counts["draws"][case.name]


@pytest.mark.parametrize("case", ROUNDS, ids=lambda case: case.name)
def test_a_round_keeps_to_its_budget(counts: Counts, case: Round) -> None:
    assert 0 < sum(counts["rounds"][case.name].values()) <= case.most, counts["rounds"][case.name]


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention_has_blocks_for_the_whole_gpu(counts: Counts, case: Attention) -> None:
    assert counts["attention"][case.name] >= case.least


def test_the_page_has_these_counts(counts: Counts) -> None:
    if counts["torch"].partition("+")[0] not in PAGE.read_text():
        pytest.skip(f"the page was made with another torch than {counts['torch']}")
    assert PAGE.read_text() == document(counts), "python -m benchmarks.gpu_nodes --write"
