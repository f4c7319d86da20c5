"""The rules have the target's law exactly, the harness that says so can fail, and each step of a verdict is right.

Shapes: B sequences, K drafted tokens, T = K + 1 target positions, V = 4 tokens, G tables.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.settings import rules as rule_module
from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft, Verdict
from llama_ssp.speculate.sampling.processors import processor
from llama_ssp.speculate.sampling.rules import Rule, make_rule, verify_block, verify_speculative
from llama_ssp.speculate.sampling.uniforms import Draws, UniformTable
from tests.helpers.draws import draws_of
from tests.helpers.exact_law import LARGEST_UNIFORM, law_error, mean_accepted
from tests.helpers.lanes import heavy, pairs, slow
from tests.helpers.table_models import TableModel, random_table

SAMPLINGS = {
    "temperature": SamplingConfig(temperature=0.7),
    "top-k": SamplingConfig(temperature=1.0, top_k=2),
    "top-p": SamplingConfig(temperature=1.0, top_p=0.8),
    "temperature and top-k": SamplingConfig(temperature=1.6, top_k=3),
    "temperature and top-p": SamplingConfig(temperature=0.7, top_p=0.9),
    "top-k and top-p": SamplingConfig(temperature=1.0, top_k=3, top_p=0.7),
    "min-p": SamplingConfig(temperature=1.3, min_p=0.25),
    "all": SamplingConfig(temperature=1.6, top_k=3, top_p=0.95, min_p=0.3),
}
CPU = torch.device("cpu")
COLD, GREEDY = SamplingConfig(temperature=0.6), SamplingConfig(temperature=0.0)
SPECULATIVE, BLOCK = (VerificationConfig(rule=rule) for rule in ("speculative", "block"))
rules = pytest.mark.parametrize("verification", [SPECULATIVE, BLOCK], ids=lambda verification: verification.rule)
verifiers = pytest.mark.parametrize("verify", [verify_speculative, verify_block])
Verify = Callable[..., Verdict]


def pair(num_draft_tokens: int) -> tuple[TableModel, TableModel]:
    """A target and a draft that differ everywhere, deep enough for one round."""
    target = random_table(seed=10 + num_draft_tokens, num_tables=3, max_length=num_draft_tokens)
    return target, random_table(seed=20 + num_draft_tokens, num_tables=3, max_length=num_draft_tokens)


def error_of(rule: Rule, sampling: SamplingConfig, num_draft_tokens: int, *, is_point_mass: bool = False) -> float:
    target, draft = pair(num_draft_tokens)
    return law_error(
        rule, sampling, target=target, draft=draft, num_draft_tokens=num_draft_tokens, is_point_mass=is_point_mass
    )


@pytest.mark.parametrize("num_draft_tokens", [1, 2, heavy(3)])
@pairs(name=[*SAMPLINGS], verification=[SPECULATIVE, BLOCK])
def test_the_text_has_exactly_the_targets_law(
    verification: VerificationConfig, name: str, num_draft_tokens: int
) -> None:
    rule = make_rule(SAMPLINGS[name], verification)
    assert error_of(rule, SAMPLINGS[name], num_draft_tokens) < 1e-12


@pytest.mark.parametrize("name", ["temperature", "all"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, slow(3)])
@rules
def test_a_draft_without_probabilities_keeps_the_targets_law(
    verification: VerificationConfig, num_draft_tokens: int, name: str
) -> None:
    """Such as tokens looked up in the prompt."""
    rule = make_rule(SAMPLINGS[name], verification)
    assert error_of(rule, SAMPLINGS[name], num_draft_tokens, is_point_mass=True) < 1e-12


@pairs(rule_name=[*rule_module.rules()], num_draft_tokens=[1, 2, 3])
def test_temperature_0_gives_the_targets_best_text_under_every_rule(rule_name: str, num_draft_tokens: int) -> None:
    assert error_of(make_rule(GREEDY, VerificationConfig(rule=rule_name)), GREEDY, num_draft_tokens) < 1e-12


def one_draw_for_two_purposes(draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Resamples with the number that accepted or rejected the first drafted token."""
    draws = draws._replace(residual_BP=draws.accept_BK[:, :1].expand(-1, 2))
    return verify_speculative(draft, target_BTV, draws=draws)


def residual_not_renormalised(draft: Draft, target_BTV: Tensor, *, draws: Draws) -> Verdict:
    """Reads the residual as if it summed to 1; what is missing falls to the last token."""
    node_B1, _, weights_B1, *_ = verify_speculative(draft, target_BTV, draws=draws)
    residual_BTV = (target_BTV - draft.drawn_law).clamp_min(0)
    cumulative_BV = residual_BTV[torch.arange(residual_BTV.shape[0]), node_B1[:, 0]].cumsum(-1)
    next_ids_B1 = (cumulative_BV <= draws.residual_BP[:, :1]).sum(-1, keepdim=True).clamp_max(3)
    return Verdict(node_B1, next_ids_B1, weights_B1)


class RawDraftProbabilities(Rule):
    """Keeps the draft's probabilities as they were before the processors."""

    def draw(
        self, logits_BTV: Tensor, uniforms_BTP: Tensor, context: Context | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return super().draw(logits_BTV, uniforms_BTP, context)[0], logits_BTV.softmax(-1)


@pytest.mark.parametrize("num_draft_tokens", [1, 2])
@pytest.mark.parametrize(
    "rule",
    [
        RawDraftProbabilities(processor(COLD), verify_speculative),
        Rule(processor(COLD), one_draw_for_two_purposes),
        Rule(processor(COLD), residual_not_renormalised),
    ],
    ids=["raw probabilities", "one draw for two", "not renormalised"],
)
def test_the_harness_catches_a_planted_fault(rule: Rule, num_draft_tokens: int) -> None:
    assert error_of(Rule(processor(COLD), verify_speculative), COLD, num_draft_tokens) < 1e-12
    assert error_of(rule, COLD, num_draft_tokens) > 1e-3


@pytest.mark.seconds
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_block_accepts_more_than_speculative_and_as_much_from_one_token(num_draft_tokens: int) -> None:
    def accepted(verification: VerificationConfig) -> Tensor:
        target, draft = pair(num_draft_tokens)
        rule = make_rule(COLD, verification)
        return mean_accepted(rule, target=target, draft=draft, num_draft_tokens=num_draft_tokens)

    gained_G = accepted(BLOCK) - accepted(SPECULATIVE)
    if num_draft_tokens == 1:
        assert gained_G.abs().max() < 1e-12
    else:
        assert gained_G.min() > 1e-3


def test_block_accepts_as_much_as_in_its_authors_example() -> None:
    # Two tokens, whatever the text: the draft's law is (2/3, 1/3), the target's (1/3, 2/3). By Sun et al., section 2,
    # of two drafted tokens 10/9 are accepted one by one, and 11/9 as a block.
    def table(*probs: float) -> TableModel:
        return TableModel(tuple(torch.tensor(probs).double().log().expand(1, 2**n, 2) for n in range(3)))

    sampling, pair = SamplingConfig(temperature=1.0), {"target": table(1, 2), "draft": table(2, 1)}
    for verification, wanted in ((SPECULATIVE, 10 / 9), (BLOCK, 11 / 9)):
        accepted_G = mean_accepted(make_rule(sampling, verification), num_draft_tokens=2, **pair)
        assert abs(float(accepted_G) - wanted) < 1e-12


def one_draft() -> tuple[Draft, Tensor]:
    """K = 1 on all four drafted ids: B = 4 rows of one random draft and target."""
    generator = torch.Generator().manual_seed(5)
    target_T4, draft_14 = (torch.randn(n, 4, generator=generator, dtype=torch.float64).softmax(-1) for n in (2, 1))
    ids_BK = torch.arange(4)[:, None]
    draft_24 = torch.cat([draft_14, torch.zeros_like(draft_14)])
    return Draft(ids_BK, draft_24.expand(4, 2, 4).contiguous()), target_T4.expand(4, 2, 4).contiguous()


def numbers(*, accept_B: Tensor, residual_BP: Tensor) -> Draws:
    """Draws of a round with K = 1."""
    return Draws(residual_BP[:, None], accept_B[:, None], residual_BP, residual_BP[:, None])


@verifiers
def test_a_token_is_accepted_just_below_the_ratio_of_its_probabilities_and_rejected_just_above(verify: Verify) -> None:
    draft, target_probs = one_draft()
    ratio_B = (target_probs[0, 0] / draft.drawn_law[0, 0]).clamp_max(1)
    half_BP = torch.full((4, 2), 0.5, dtype=torch.float64)
    below = verify(draft, target_probs, draws=numbers(accept_B=ratio_B - 1e-12, residual_BP=half_BP))
    above_B = (ratio_B + 1e-12).clamp_max(LARGEST_UNIFORM)
    above = verify(draft, target_probs, draws=numbers(accept_B=above_B, residual_BP=half_BP))
    assert below.node_B1.tolist() == [[1]] * 4
    assert above.node_B1[:, 0].tolist() == (ratio_B == 1).long().tolist()
    assert 0 < int((ratio_B == 1).sum()) < 4


@verifiers
def test_a_token_that_the_target_cannot_say_is_never_accepted(verify: Verify) -> None:
    draft = Draft(torch.tensor([[0]]), torch.tensor([[[0.5, 0.5, 0.0, 0.0], [0.0] * 4]]))
    target_probs = torch.tensor([[[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    zero_BP = torch.zeros(1, 2, dtype=torch.float64)
    verdict = verify(draft, target_probs, draws=numbers(accept_B=zero_BP[:, 0], residual_BP=zero_BP))
    assert (verdict.node_B1.item(), verdict.next_ids_B1.item()) == (0, 2)


@verifiers
def test_the_next_token_changes_where_the_shares_of_residual_or_bonus_row_say(verify: Verify) -> None:
    draft, target_probs = one_draft()
    residual = (target_probs[0, 0] - draft.drawn_law[0, 0]).clamp_min(0)
    rejected = int((draft.drawn_law[0, 0] - target_probs[0, 0]).argmax())
    num_checked = 0
    for accept, law in ((LARGEST_UNIFORM, residual / residual.sum()), (0.0, target_probs[0, 1])):
        blocks_CM = law.view(2, 2)
        border = float(blocks_CM[0].sum())
        for block, first in ((0, border - 1e-12), (1, border + 1e-12)):
            share = float(blocks_CM[block, 0] / blocks_CM[block].sum())  # NaN for a block that is never drawn
            for place, second in ((0, share - 1e-12), (1, share + 1e-12)):
                if 0 < second < 1:
                    residual_BP = torch.tensor([[first, second]], dtype=torch.float64)
                    draws = numbers(accept_B=torch.full((1,), accept, dtype=torch.float64), residual_BP=residual_BP)
                    row = Draft(draft.ids_BK[[rejected]], draft.drawn_law[:1])
                    verdict = verify(row, target_probs[:1], draws=draws)
                    assert verdict.next_ids_B1.item() == 2 * block + place
                    num_checked += 1
    assert num_checked >= 6


@verifiers
def test_without_a_residual_the_next_token_comes_from_the_targets_row(verify: Verify) -> None:
    # Rounding can leave a draft row at or above the target's everywhere, so that nothing is left to resample from.
    target_probs = torch.tensor([[[0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]]).expand(2, 2, 4)
    draft = Draft(torch.tensor([[0], [0]]), torch.tensor([[[0.1, 0.5, 0.5, 0.0], [0.0] * 4]]).expand(2, 2, 4))
    residual_BP = torch.tensor([[0.25, 0.25], [0.75, 0.75]], dtype=torch.float64)
    draws = numbers(accept_B=residual_BP[:, 0], residual_BP=residual_BP)
    verdict = verify(draft, target_probs, draws=draws)
    assert verdict.node_B1.tolist() == [[0], [0]]
    assert verdict.next_ids_B1.tolist() == [[1], [2]]


@verifiers
def test_nan_that_decides_is_in_the_weight(verify: Verify) -> None:
    """A block is accepted by all rows: with NaN in one of them no prefix passes."""
    draft, target_probs = one_draft()
    draws = numbers(accept_B=torch.full((4,), 0.5).double(), residual_BP=torch.full((4, 2), 0.5).double())
    accepted_B1 = verify(draft, target_probs, draws=draws).node_B1
    for position in range(2):
        broken_BTV = target_probs.clone()
        broken_BTV[:, position] = torch.nan
        is_nan_B1 = verify(draft, broken_BTV, draws=draws).weights_B1.isnan()
        decides_B1 = (accepted_B1 == position) | (position == 0) | (verify is verify_block)
        assert torch.equal(is_nan_B1, decides_B1)


def test_greedy_stops_at_the_first_token_that_is_not_the_best() -> None:
    best_BT = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    ids_BK = torch.tensor([[1, 2], [1, 0], [0, 2]])
    logits_BTV = torch.nn.functional.one_hot(best_BT, 4).float()
    rule = make_rule(GREEDY, VerificationConfig())
    verdict = rule.verify(Draft(ids_BK), logits_BTV, draws=draws_of(UniformTable(2, CPU), *[torch.arange(3)] * 2))
    assert verdict.node_B1.tolist() == [[2], [1], [0]]
    assert verdict.next_ids_B1.tolist() == [[3], [2], [1]]


@rules
def test_a_row_has_the_same_verdict_alone_and_in_a_batch(verification: VerificationConfig) -> None:
    generator = torch.Generator().manual_seed(6)
    rule = make_rule(SAMPLINGS["top-k and top-p"], verification)
    target_logits_BTV = torch.randn(32, 4, 50, generator=generator)
    draws = draws_of(UniformTable(3, CPU), torch.arange(32), torch.arange(32))
    ids_BK, probs_BKV = rule.draw(target_logits_BTV[:, :3].roll(1, 0), draws.draft_BKP)
    assert probs_BKV is not None
    probs_BTV = pad(probs_BKV, (0, 0, 0, 1))
    target_BTV = rule.process(target_logits_BTV)
    joint = rule.verify(Draft(ids_BK, probs_BTV), target_BTV, draws=draws)
    for row in range(32):
        one = slice(row, row + 1)
        own = Draws(*(numbers_B[one] for numbers_B in draws))
        alone = rule.verify(Draft(ids_BK[one], probs_BTV[one]), target_BTV[one], draws=own)
        assert alone == Verdict(*(part[one] for part in joint))
    assert joint.node_B1.unique().numel() > 1


@pytest.mark.parametrize("sampling", [*SAMPLINGS.values(), GREEDY], ids=str)
@rules
def test_no_value_is_read_between_the_keys_and_the_verdict(
    verification: VerificationConfig, sampling: SamplingConfig
) -> None:
    device = torch.device("meta")
    index_B = torch.zeros(2, dtype=torch.long, device=device)
    rule = make_rule(sampling, verification)
    draws = draws_of(UniformTable(3, device), index_B, index_B)
    ids_BK, probs_BKV = rule.draw(torch.empty(2, 3, 50, device=device), draws.draft_BKP)
    draft = Draft(ids_BK, POINT_MASS if probs_BKV is None else pad(probs_BKV, (0, 0, 0, 1)))
    verdict = rule.verify(draft, rule.process(torch.empty(2, 4, 50, device=device)), draws=draws)
    assert verdict.node_B1.shape == verdict.next_ids_B1.shape == (2, 1)


def test_the_law_of_a_certain_draft_is_a_point_mass_at_each_token() -> None:
    certain = Draft(torch.tensor([[2, 0, 1]]))
    law_BTV = certain.probs_like(torch.ones(1, 4, 4, dtype=torch.float64))
    assert law_BTV[0, :3].argmax(-1).tolist() == [2, 0, 1]
    assert law_BTV.sum(-1).tolist() == [[1, 1, 1, 0]]
    assert certain.first().followed_by(Draft(torch.tensor([[3]]))).ids_BK.tolist() == [[2, 3]]
    drawn = Draft(certain.ids_BK, law_BTV)
    again = drawn.first().followed_by(Draft(certain.ids_BK[:, 1:], law_BTV[:, 1:]))
    assert drawn.probs_like(law_BTV) is law_BTV
    assert torch.equal(again.ids_BK, drawn.ids_BK)
    assert torch.equal(again.drawn_law, law_BTV)
