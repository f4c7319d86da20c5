"""A draft without probabilities, such as tokens looked up in the prompt, keeps the target's law."""

import pytest
import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Draft, Rule, Verdict, make_rule
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.exact_law import exact_law
from tests.helpers.lanes import heavy
from tests.helpers.table_models import joint_law, random_table

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "all": SamplingConfig(temperature=1.6, top_k=3, top_p=0.95, min_p=0.3),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, heavy(3)])
@pytest.mark.parametrize("rule_name", ["speculative", "block"])
def test_a_point_mass_keeps_the_targets_law(rule_name: str, num_draft_tokens: int, sampling: str) -> None:
    target, draft = (random_table(seed=seed, num_tables=3, max_length=num_draft_tokens) for seed in (11, 21))
    rule = make_rule(SAMPLINGS[sampling], VerificationConfig(rule=rule_name))
    law = exact_law(rule, target=target, draft=draft, num_draft_tokens=num_draft_tokens, is_point_mass=True)
    process = processor(SAMPLINGS[sampling])
    assert float((law - joint_law(tuple(process(logits) for logits in target.logits))).abs().max()) < 1e-12


class LessThanCertain:
    """Takes a copied token for one that was drawn with probability 0.7."""

    needs_context = False

    def __init__(self, shipped: Rule) -> None:
        self.draw, self.process, self._shipped = shipped.draw, shipped.process, shipped

    def verify(self, draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
        probs_BTV = torch.zeros_like(target_BTV)
        probs_BTV[:, :-1] = 0.1
        probs_BTV[:, :-1].scatter_(-1, draft.ids_BK[..., None], 0.7)
        return self._shipped.verify(Draft(draft.ids_BK, probs_BTV), target_BTV, draws=draws)


@pytest.mark.parametrize("rule_name", ["speculative", "block"])
def test_a_copied_token_that_is_taken_for_a_drawn_one_is_found(rule_name: str) -> None:
    target, draft = (random_table(seed=seed, num_tables=3, max_length=1) for seed in (11, 21))
    rule = LessThanCertain(make_rule(SAMPLINGS["temperature"], VerificationConfig(rule=rule_name)))
    law = exact_law(rule, target=target, draft=draft, num_draft_tokens=1, is_point_mass=True)
    process = processor(SAMPLINGS["temperature"])
    assert float((law - joint_law(tuple(process(logits) for logits in target.logits))).abs().max()) > 1e-3
