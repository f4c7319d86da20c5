"""The page of kinds: every kind of the installed transformers, with the verdict that a plan gives by config.json."""

from functools import cache
from pathlib import Path

import pytest
import transformers

from benchmarks.families import LATER, MORE, OTHER, PAGE, RANKS, planned_refusal, sizes_of, tables_of
from benchmarks.measured import PAGES
from tests.helpers.flags import NOT_BUILT
from tests.helpers.library_kinds import every_kind, text_kinds
from tests.helpers.models import FAMILIES

pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith("5.23."), reason="the page is of transformers 5.23"
)
FEWEST_ON_TWO = 169


@cache
def verdicts() -> dict[str, list[str]]:
    """The cells of 1, 2 and 3 ranks by kind."""
    texts, others, wholes, _ = tables_of((PAGES / PAGE).read_text())
    return {row[0]: row[-3:] for row in texts + others + wholes}


@pytest.mark.heavy
def test_the_page_has_every_kind_and_none_is_refused_after_its_plan() -> None:
    found, of_tests = verdicts(), {kind.partition(",")[0] for kind in FAMILIES}
    assert {kind.partition(",")[0] for kind in found} == {*every_kind(), *text_kinds()} | of_tests
    assert not [kind for kind, cells in found.items() if any(LATER in cell or OTHER in cell for cell in cells)]


def test_kinds_run_on_two_ranks() -> None:
    """Text models, and the text parts of models that also read images or audio."""
    on_two = {kind.partition(",")[0] for kind, (_, cell, _) in verdicts().items() if cell == "equal"}
    assert len(on_two) >= FEWEST_ON_TWO


@pytest.mark.slow
def test_plans_say_what_the_page_says(tmp_path: Path) -> None:
    """By config.json alone, also of kinds that a run alone could refuse: there are none."""
    for kind, cells in verdicts().items():
        sizes = MORE.get(kind) or ({} if kind in {*FAMILIES, *MORE, *text_kinds()} else sizes_of(kind))
        for num_ranks, cell in zip(RANKS, cells, strict=True):
            said = planned_refusal(kind, sizes, tmp_path, num_ranks)
            assert cell == (said or "equal") or cell.startswith(NOT_BUILT), (kind, num_ranks)
