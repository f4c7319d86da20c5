"""The page's test of a drafter holds for the page's drafter, and fails for one that states another law."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from llama_ssp.speculate.sampling.draft import Draft
from tests.helpers.plugins import drafter_with_law, examples


def the_test_of(drafter: type, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The test function of docs/extending.md, of a drafter."""
    module: Any = ModuleType("my_laws")
    module.NearDrafter = drafter
    monkeypatch.setitem(sys.modules, "my_laws", module)
    names: dict[str, Any] = {}
    exec(examples("How to test a drafter")[0], names)
    return names["test_texts_have_the_targets_law"]


@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_drafter_of_the_page_passes(rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    the_test_of(drafter_with_law(), monkeypatch)(rule, temperature)


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_one_that_states_another_law_fails(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(drafter_with_law()):  # type: ignore[misc] # a class of the page
        def propose(self, rows: Any, **how: Any) -> Draft:
            draft = super().propose(rows, **how)
            even_BTV = torch.full_like(draft.drawn_law, 0.25)
            even_BTV[:, -1] = 0
            return Draft(draft.ids_BK, even_BTV)

    with pytest.raises(AssertionError):
        the_test_of(Careless, monkeypatch)(rule, 0.8)
