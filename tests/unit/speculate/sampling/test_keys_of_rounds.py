"""Why uniforms are keyed by the start of a round, and not by position alone: `block` looks at tokens that it drops.

Two rounds of K = 2 are simulated in many texts at once. With keys by position, the second round would decide with the
number that the first one has looked at.
"""

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Draft, Rule, make_rule
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, Draws
from tests.helpers.table_models import TableModel, random_table

NUM_TEXTS, VOCAB, K = 200_000, 4, 2
SAMPLING = SamplingConfig(temperature=1.5)


def after(model: TableModel, ids_BT: Tensor) -> Tensor:
    """The logits (B, V) after some texts."""
    codes_B = torch.zeros(ids_BT.shape[0], dtype=torch.int64)
    for ids_B in ids_BT.unbind(1):
        codes_B = codes_B * VOCAB + ids_B
    return model.logits[ids_BT.shape[1]][0, codes_B]


def round_of(
    rule: Rule, target: TableModel, draft: TableModel, text_BT: Tensor, *, accept_BK: Tensor, numbers: torch.Generator
) -> tuple[Tensor, Tensor]:
    """How many drafted tokens are accepted (B,), and the text with the drafted ones and then the next one behind."""

    def draws() -> Tensor:
        return torch.rand(text_BT.shape[0], PER_DRAW, generator=numbers, dtype=torch.float64)

    drafted_BT, probs = text_BT, list[Tensor]()
    for _ in range(K):
        ids_B1, probs_BV = rule.draw(after(draft, drafted_BT), draws())
        assert probs_BV is not None
        drafted_BT, probs = torch.cat([drafted_BT, ids_B1], dim=1), [*probs, probs_BV]
    probs_BTV = torch.stack([*probs, torch.zeros_like(probs[0])], dim=1)
    length = text_BT.shape[1]
    logits_BTV = torch.stack([after(target, drafted_BT[:, : length + place]) for place in range(K + 1)], dim=1)
    residual_BP = draws()
    all_draws = Draws(residual_BP[:, None].expand(-1, K, -1), accept_BK, residual_BP, residual_BP)
    verdict = rule.verify(Draft(drafted_BT[:, length:], probs_BTV), rule.process(logits_BTV), draws=all_draws)
    return verdict.num_accepted_B1[:, 0], torch.cat([drafted_BT, verdict.next_ids_B1], dim=1)


def p_value(rule_name: str, *, by_position: bool) -> float:
    """Of the second token after each first one, in texts whose first round accepted nothing, under the exact law."""
    target, draft = (random_table(seed=seed, num_tables=1, max_length=4) for seed in (91, 92))
    rule = make_rule(SAMPLING, VerificationConfig(rule=rule_name))
    numbers = torch.Generator().manual_seed(8)
    accept_BK = torch.rand(NUM_TEXTS, K, generator=numbers, dtype=torch.float64)
    nothing = torch.zeros(NUM_TEXTS, 0, dtype=torch.int64)
    accepted_B, whole_BT = round_of(rule, target, draft, nothing, accept_BK=accept_BK, numbers=numbers)
    dropped_B = accepted_B == 0
    first_B1 = whole_BT[dropped_B, -1:]
    later_BK = torch.rand(first_B1.shape[0], K, generator=numbers, dtype=torch.float64)
    if by_position:
        later_BK[:, 0] = accept_BK[dropped_B, 1]
    accepted_B, whole_BT = round_of(rule, target, draft, first_B1, accept_BK=later_BK, numbers=numbers)
    second_B = torch.where(accepted_B == 0, whole_BT[:, -1], whole_BT[:, 1])
    counts_VV = (first_B1[:, 0] * VOCAB + second_B).bincount(minlength=VOCAB**2).view(VOCAB, VOCAB).double()
    law_VV = processor(SAMPLING)(target.logits[1])[0] * counts_VV.sum(-1, keepdim=True)
    possible_VV = law_VV > 0
    assert counts_VV[~possible_VV].sum() == 0
    num_free = int(possible_VV.sum() - (counts_VV.sum(-1) > 0).sum())
    statistic = ((counts_VV - law_VV)[possible_VV] ** 2 / law_VV[possible_VV]).sum()
    return float(chi2.sf(float(statistic), num_free))


@pytest.mark.parametrize("rule_name", ["speculative", "block"])
def test_keys_of_rounds_keep_the_law(rule_name: str) -> None:
    """A false alarm has a chance of 1 in 10 000, and always the same numbers."""
    assert p_value(rule_name, by_position=False) > 1e-4


def test_keys_of_positions_alone_are_found_under_block() -> None:
    assert p_value("block", by_position=True) < 1e-8


def test_keys_of_positions_would_do_for_a_rule_that_stops_at_the_first_rejection() -> None:
    assert p_value("speculative", by_position=True) > 1e-4
