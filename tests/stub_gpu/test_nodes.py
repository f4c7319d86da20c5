"""Graphs keep to the budgets of `benchmarks.gpu_nodes`, and the page of the docs has today's counts."""

from typing import Any

import pytest

from benchmarks.gpu_nodes import CASES, PAGE, Case, count_all, document
from tests.stub_gpu.process import Stub


@pytest.fixture(scope="module")
def counts(stub: Stub) -> dict[str, Any]:
    """All counts of `benchmarks.gpu_nodes`."""
    return count_all(stub)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_graphs_keep_to_their_budgets(counts: dict[str, Any], case: Case) -> None:
    assert case.keeps(counts[case.kind][case.name]), counts[case.kind][case.name]


def test_the_page_has_these_counts(counts: dict[str, Any]) -> None:
    if counts["torch"].partition("+")[0] not in PAGE.read_text():
        pytest.skip(f"the page was made with another torch than {counts['torch']}")
    assert PAGE.read_text() == document(counts), "python -m benchmarks.gpu_nodes --write"
