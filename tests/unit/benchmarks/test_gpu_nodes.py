"""The budgets of GPU kernels: the page shows all of them, and a case that exceeds its own is named."""

from typing import Any

from benchmarks.gpu_budgets import ATTENTION, DRAWS, LAYERS, ROUNDS, Draw, Layer, Round
from benchmarks.gpu_nodes import PAGE, document, over_budget
from llama_ssp.architectures.sizes import ENGINE_KERNELS


def counts_at_budget() -> dict[str, Any]:
    return {
        "torch": "2",
        "layers": {case.name: {"matrix product": case.most} for case in LAYERS},
        "draws": {case.name: {"other": case.most} for case in DRAWS},
        "rounds": {case.name: {"other": case.most} for case in ROUNDS},
        "attention": {case.name: case.least for case in ATTENTION},
    }


def test_no_two_cases_have_one_name() -> None:
    for cases in (LAYERS, DRAWS, ROUNDS, ATTENTION):
        assert len({case.name for case in cases}) == len(cases)


def test_a_case_over_its_budget_is_named_with_both_numbers() -> None:
    counts = counts_at_budget()
    assert over_budget(counts) == []
    counts["rounds"][ROUNDS[0].name]["matrix product"] = 1
    counts["attention"][ATTENTION[0].name] -= 1
    most, least = ROUNDS[0].most, ATTENTION[0].least
    assert over_budget(counts) == [
        f"{ROUNDS[0].name}: {most + 1} nodes, at most {most}",
        f"{ATTENTION[0].name}: {least - 1} blocks, at least {least}",
    ]


def test_the_page_shows_every_case_with_its_budget() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {(row[0].removeprefix("| "), int(row[2].removesuffix(" |"))) for row in rows if row[1].isdigit()}
    cases: list[Layer | Draw | Round] = [*LAYERS, *DRAWS, *ROUNDS]
    budgets = {(case.name, case.most) for case in cases}
    assert shown == budgets | {(case.name, case.least) for case in ATTENTION}
    assert document(counts_at_budget()).count("\n| ") == len(rows)


def test_plans_price_the_kernels_that_are_counted() -> None:
    """Where a layer or a draw needs fewer, `architectures.sizes.ENGINE_KERNELS` follows."""
    of_one_row = [case for case in LAYERS if case.num_ranks == case.batch_size == 1 and not case.fuses]
    layers = {case.most for case in of_one_row}
    assert layers == {ENGINE_KERNELS.layer}
    assert [case.most for case in DRAWS if case.name == "sampled"] == [ENGINE_KERNELS.draw]
