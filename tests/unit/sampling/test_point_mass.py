"""A draft without probabilities, such as tokens looked up in the prompt, keeps the target's law."""

import pytest

from llama_ssp.config.schema import SamplingConfig, VerificationConfig
from llama_ssp.sampling.processors import processor
from llama_ssp.sampling.rules import make_rule
from tests.helpers.exact_law import exact_law
from tests.helpers.table_models import joint_law, random_table

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "all": SamplingConfig(temperature=1.6, top_k=3, top_p=0.95, min_p=0.3),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_draft_tokens", [1, 2])
@pytest.mark.parametrize("rule_name", ["speculative", "block"])
def test_a_point_mass_keeps_the_targets_law(rule_name: str, num_draft_tokens: int, sampling: str) -> None:
    target, draft = (random_table(seed=seed, num_tables=3, max_length=num_draft_tokens) for seed in (11, 21))
    rule = make_rule(SAMPLINGS[sampling], VerificationConfig(rule=rule_name))
    law = exact_law(rule, target=target, draft=draft, num_draft_tokens=num_draft_tokens, is_point_mass=True)
    process = processor(SAMPLINGS[sampling])
    assert float((law - joint_law(tuple(process(logits) for logits in target.logits))).abs().max()) < 1e-12
