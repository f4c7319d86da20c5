"""The budgets of GPU kernels: the page shows all, a count beyond one is found, and plans price what is counted."""

from benchmarks.gpu_nodes import BLOCKS, CASES, DRAW, LAYER, PAGE, document
from llama_ssp.settings.layout import ENGINE_KERNELS


def test_the_page_shows_every_case_with_its_budget_and_a_count_within_it() -> None:
    text = PAGE.read_text()
    tables = {part.partition(" | ")[0]: part.splitlines() for part in text.split("\n\n| ")}
    at_budget = {case.kind: {} for case in CASES}  # type: ignore[var-annotated]
    for case in CASES:
        [row] = [line.split(" | ") for line in tables[case.kind] if line.startswith(f"| {case.name} | ")]
        assert row[2].removesuffix(" |") == str(case.limit)
        assert case.keeps({"nodes": int(row[1])})
        assert not case.keeps({"nodes": case.limit + (-1 if case.kind == BLOCKS else 1)})
        at_budget[case.kind][case.name] = {"other": case.limit}
    assert document({"torch": "2", **at_budget}).count("\n| ") == text.count("\n| ")


def test_plans_price_the_kernels_that_are_counted() -> None:
    """Where a layer or a draw needs fewer, `settings.layout.ENGINE_KERNELS` follows."""
    of_one_row = [case for case in CASES if case.kind == LAYER and case.num_ranks == case.batch_size == 1]
    assert {case.limit for case in of_one_row} == {ENGINE_KERNELS.layer}
    assert [case.limit for case in CASES if case.kind == DRAW and case.name == "sampled"] == [ENGINE_KERNELS.draw]
