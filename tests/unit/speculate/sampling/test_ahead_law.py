"""Drafting that overlaps verification: the law of the text on tables; see `helpers.ahead_law`."""

from typing import cast

import pytest
import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.draft import Verdict
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_ahead
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.ahead_law import Decide, law_of_text, table_scores
from tests.helpers.lanes import grid
from tests.helpers.table_models import joint_law, random_table

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k and top-p": SamplingConfig(temperature=1.0, top_k=2, top_p=0.7),
    "min-p": SamplingConfig(temperature=1.3, min_p=0.25),
    "greedy": SamplingConfig(temperature=0.0),
}


def error(rule_name: str, name: str, *, num_drafted: int, wanted: int, decide: Decide = verify_ahead) -> float:
    sampling, vocab_size = SAMPLINGS[name], 3 if num_drafted < 3 else 2
    longest = wanted + 2 * num_drafted - 2
    target, draft = (
        random_table(seed=seed, num_tables=1, max_length=longest, vocab_size=vocab_size) for seed in (51, 52)
    )
    rule = make_rule(sampling, VerificationConfig(rule=rule_name))
    law_C = law_of_text(rule, table_scores(target), draft, num_drafted=num_drafted, wanted=wanted, decide=decide)
    if sampling.temperature:
        expected = joint_law(tuple(processor(sampling)(logits) for logits in target.logits[:wanted]))[0]
    else:
        best = tuple(torch.nn.functional.one_hot(logits.argmax(-1), vocab_size).double() for logits in target.logits)
        expected = joint_law(best[:wanted])[0]
    return float((law_C - expected).abs().max())


@grid(rule_name=["speculative", "block"], name=[*SAMPLINGS], size=[(1, 3), (2, 3), (3, 4)])
def test_overlapped_rounds_keep_the_targets_law(rule_name: str, name: str, size: tuple[int, int]) -> None:
    assert error(rule_name, name, num_drafted=size[0], wanted=size[1]) < 1e-12


def bonus_before_a_block(*drafts: object, ahead_B: Tensor, draws: Draws) -> Verdict:
    """A block that was drafted behind one token is kept behind another."""
    verdict = verify_ahead(*drafts, ahead_B=ahead_B, draws=draws)  # type: ignore[arg-type]
    best_B1 = cast("Tensor", drafts[-1])[:, -1].argmax(-1, keepdim=True)
    next_ids_B1 = torch.where(verdict.node_B1 > ahead_B[:, None], best_B1, verdict.next_ids_B1)
    return verdict._replace(next_ids_B1=next_ids_B1)


def block_behind_a_rejection(*drafts: object, ahead_B: Tensor, draws: Draws) -> Verdict:
    verdict = verify_ahead(*drafts, ahead_B=ahead_B, draws=draws)  # type: ignore[arg-type]
    return verdict._replace(node_B1=ahead_B[:, None] + 1)


def dropping(rule: Rule, *arguments: Tensor, ahead_B: Tensor, draws: Draws) -> Verdict:
    """Blocks are dropped from rows that go on plainly, which is no fault."""
    verdict = verify_ahead(rule, *arguments, ahead_B=ahead_B, draws=draws)  # type: ignore[arg-type]
    same = draws._replace(plain_BTP=draws.residual_BP[:, None])
    most_B1 = (ahead_B[:, None] == 0) * 9
    return rule.at_most(verdict, most_B1, arguments[-1], draws=same)


@pytest.mark.parametrize("decide", [bonus_before_a_block, block_behind_a_rejection, dropping])
def test_a_block_in_flight_behind_another_token_is_found(decide: Decide) -> None:
    found = error("speculative", "temperature", num_drafted=2, wanted=3, decide=decide)
    assert found < 1e-12 if decide is dropping else found > 1e-3
