"""A draft with other tokens keeps the target's law exactly, under every rule and processor, and a fault would show.

The draft has five tokens of its own. `SHARED` says which of them is each of the target's four.

Shapes: G tables, V = 4 tokens of the target, D = 5 of the draft, t length of a prefix.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.extensions.tokenizers.alignment import Alignment
from llama_ssp.extensions.tokenizers.drafter import VocabularyMap
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import Verdict
from llama_ssp.speculate.sampling.processors import draw, processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_block, verify_speculative
from tests.helpers.exact_law import law_error
from tests.helpers.lanes import grid
from tests.helpers.table_models import TableModel, random_table

NUM_DRAFT_IDS = 5
SHARED = {"three": (2, None, 0, 4), "one": (None, 3, None, None), "all": (4, 3, 1, 0)}
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k and top-p": SamplingConfig(temperature=1.0, top_k=3, top_p=0.7),
    "all": SamplingConfig(temperature=1.6, top_k=3, top_p=0.95, min_p=0.3),
    "greedy": SamplingConfig(temperature=0.0),
}


def vocabularies(shared: tuple[int | None, ...]) -> VocabularyMap:
    alignment = Alignment(shared=shared, pieces=tuple((token or 0,) for token in shared))
    return VocabularyMap.of(alignment, draft_size=NUM_DRAFT_IDS, device=torch.device("cpu"))


def moved(shared: tuple[int | None, ...], *, num_draft_tokens: int, is_normalised: bool = False) -> TableModel:
    """A random draft over its own prefixes, as the target's prefixes and ids see it.

    With `is_normalised` the logits are log probabilities over all of the draft's tokens.
    """
    generator = torch.Generator().manual_seed(num_draft_tokens)
    tables = []
    for length in range(num_draft_tokens):
        own = 1.5 * torch.randn(3, NUM_DRAFT_IDS**length, NUM_DRAFT_IDS, generator=generator, dtype=torch.float64)
        own = own.log_softmax(-1) if is_normalised else own
        codes = []
        for prefix in product(range(len(shared)), repeat=length):
            code = 0
            for token in prefix:
                code = code * NUM_DRAFT_IDS + (shared[token] or 0)  # a prefix with other tokens is never drafted
            codes.append(code)
        rows = own[:, codes]
        tables.append(vocabularies(shared).to_target(rows.flatten(0, 1)).view(*rows.shape[:2], len(shared)))
    return TableModel(tuple(tables))


@pytest.mark.seconds
@grid(shared=list(SHARED), name=list(SAMPLINGS), rule_name=["speculative", "block"], num_draft_tokens=[1, 2, 3])
def test_the_text_has_exactly_the_targets_law(shared: str, name: str, rule_name: str, num_draft_tokens: int) -> None:
    rule = make_rule(SAMPLINGS[name], VerificationConfig(rule=rule_name))
    target = random_table(seed=10 + num_draft_tokens, num_tables=3, max_length=num_draft_tokens)
    draft = moved(SHARED[shared], num_draft_tokens=num_draft_tokens)
    how: dict[str, Any] = {"target": target, "draft": draft, "num_draft_tokens": num_draft_tokens}
    assert law_error(rule, SAMPLINGS[name], **how) < 1e-12


class NotRenormalised(Rule):
    """A rule whose draft says the probabilities that its tokens have among all tokens of the draft."""

    def draw(self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        probs_B1V = logits_BTV.exp()
        return draw(probs_B1V[:, 0], uniforms_BTP[:, 0]), probs_B1V


@pytest.mark.parametrize("verify", [verify_speculative, verify_block])
def test_an_intersection_that_is_not_renormalised_is_found(verify: Callable[..., Verdict]) -> None:
    for is_planted in (False, True):
        # The harness draws the rest of a text by the rule too, so its target's logits are log probabilities as well.
        rule = (NotRenormalised if is_planted else Rule)(processor(SamplingConfig(temperature=1.0)), verify)
        target = random_table(seed=12, num_tables=3, max_length=1)
        target = TableModel(tuple(logits.log_softmax(-1) for logits in target.logits))
        draft = moved(SHARED["three"], num_draft_tokens=1, is_normalised=True)
        error = law_error(rule, SamplingConfig(temperature=1.0), target=target, draft=draft, num_draft_tokens=1)
        assert error > 0.01 if is_planted else error < 1e-12
