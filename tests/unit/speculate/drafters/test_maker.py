"""Which drafters a rank makes."""

from dataclasses import replace

import pytest
import torch

from llama_ssp import load
from llama_ssp.settings.drafters import NGRAM_DRAFT
from llama_ssp.settings.schema import ADAPTIVE, SpeculationConfig
from llama_ssp.speculate.drafters.drafter import Drafter
from llama_ssp.speculate.drafters.maker import make_drafters
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.rules import make_rule


def made(speculation: SpeculationConfig, *, fallback: str | None = None) -> list[Drafter]:
    pair = load("tiny-draft", NGRAM_DRAFT)
    config = replace(pair.config, draft=replace(pair.config.draft, fallback=fallback), speculation=speculation)
    return make_drafters(
        config, rule=make_rule(config.sampling, config.verification), mesh=pair.models.mesh, runner=None,
        vocab_size=pair.models.target.vocab_size, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(("num_draft_tokens", "tree", "wanted"), [(ADAPTIVE, None, 2), (4, None, 1), (4, "2x1", 1)])
def test_a_fallback_is_made_only_where_rounds_choose(
    num_draft_tokens: int | str, tree: str | None, wanted: int
) -> None:
    """At a point of a sweep it may be given without effect."""
    assert len(made(SpeculationConfig(num_draft_tokens=num_draft_tokens, tree=tree), fallback=NGRAM_DRAFT)) == wanted


@pytest.mark.parametrize(("tree", "wanted"), [(None, [6, 1]), ("2", [6, 5])])
def test_look_up_drafts_the_tree_of_the_settings(tree: str | None, wanted: list[int]) -> None:
    [drafter] = made(SpeculationConfig(num_draft_tokens=2, tree=tree))
    rows = Rows(torch.tensor([[1, 5, 1, 6, 1, 0, 0, 0]]), *[torch.tensor([5])] * 3)
    draft = drafter.propose(rows, num_tokens=2, uniforms_BKP=torch.zeros(1, 2, 2), bucket=8)
    assert draft.ids_BK.tolist() == [wanted]
