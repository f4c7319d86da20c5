"""A draft with other tokens keeps the target's law exactly, under every rule and processor, and a fault would show.

The draft has five tokens of its own. `SHARED` says which of them is each of the target's four.

Shapes: G tables, V = 4 tokens of the target, D = 5 of the draft, t length of a prefix.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.drafters.intersection import VocabularyMap
from llama_ssp.speculate.drafters.tokenizers import Alignment
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import Verdict
from llama_ssp.speculate.sampling.processors import draw, processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_block, verify_speculative
from tests.helpers.exact_law import exact_law
from tests.helpers.lanes import grid
from tests.helpers.table_models import TableModel, joint_law, random_table

NUM_DRAFT_IDS = 5
SHARED = {"three": (2, None, 0, 4), "one": (None, 3, None, None), "all": (4, 3, 1, 0)}
SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k and top-p": SamplingConfig(temperature=1.0, top_k=3, top_p=0.7),
    "all": SamplingConfig(temperature=1.6, top_k=3, top_p=0.95, min_p=0.3),
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


def law_error(rule: Rule, sampling: SamplingConfig, *, draft: TableModel, num_draft_tokens: int) -> float:
    """The largest difference between a rule's law of K + 1 tokens and the target's."""
    target = random_table(seed=10 + num_draft_tokens, num_tables=3, max_length=num_draft_tokens)
    measured = exact_law(rule, target=target, draft=draft, num_draft_tokens=num_draft_tokens)
    expected = joint_law(tuple(processor(sampling)(logits) for logits in target.logits))
    return float((measured - expected).abs().max())


@grid(shared=list(SHARED), name=list(SAMPLINGS), rule_name=["speculative", "block"], num_draft_tokens=[1, 2, 3])
def test_the_text_has_exactly_the_targets_law(shared: str, name: str, rule_name: str, num_draft_tokens: int) -> None:
    sampling = SAMPLINGS[name]
    rule = make_rule(sampling, VerificationConfig(rule=rule_name))
    draft = moved(SHARED[shared], num_draft_tokens=num_draft_tokens)
    assert law_error(rule, sampling, draft=draft, num_draft_tokens=num_draft_tokens) < 1e-12


@pytest.mark.parametrize("num_draft_tokens", [1, 2])
def test_temperature_0_gives_the_targets_best_text(num_draft_tokens: int) -> None:
    rule = make_rule(SamplingConfig(temperature=0.0), VerificationConfig())
    target = random_table(seed=3, num_tables=3, max_length=num_draft_tokens)
    draft = moved(SHARED["three"], num_draft_tokens=num_draft_tokens)
    measured = exact_law(rule, target=target, draft=draft, num_draft_tokens=num_draft_tokens)
    best = tuple(torch.nn.functional.one_hot(logits.argmax(-1), 4).double() for logits in target.logits)
    torch.testing.assert_close(measured, joint_law(best), rtol=0, atol=1e-12)


class NotRenormalised(Rule):
    """A rule whose draft says the probabilities that its tokens have among all tokens of the draft."""

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        probs_BV = logits_BV.exp()
        return draw(probs_BV, uniforms_BP), probs_BV


@pytest.mark.parametrize("verify", [verify_speculative, verify_block])
def test_an_intersection_that_is_not_renormalised_is_found(verify: Callable[..., Verdict]) -> None:
    for is_planted in (False, True):
        # The harness draws the rest of a text by the rule too, so its target's logits are log probabilities as well.
        rule = (NotRenormalised if is_planted else Rule)(processor(SamplingConfig(temperature=1.0)), verify)
        target = random_table(seed=12, num_tables=3, max_length=1)
        target = TableModel(tuple(logits.log_softmax(-1) for logits in target.logits))
        draft = moved(SHARED["three"], num_draft_tokens=1, is_normalised=True)
        measured = exact_law(rule, target=target, draft=draft, num_draft_tokens=1)
        expected = joint_law(tuple(logits.exp() for logits in target.logits))
        error = float((measured - expected).abs().max())
        assert error > 0.01 if is_planted else error < 1e-12
