"""Rows that take fewer drafted tokens than a round drafts: the exact law of the first tokens of a text."""

from collections.abc import Callable

import pytest
import torch

from llama_ssp.settings.schema import SamplingConfig, VerificationConfig
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.rules import Rule, make_rule
from llama_ssp.speculate.sampling.uniforms import Draws
from tests.helpers.exact_law import law_error, round_verdicts
from tests.helpers.lanes import grid
from tests.helpers.table_models import TableModel, random_table

K = 3
SAMPLINGS = {"temperature": SamplingConfig(temperature=0.7), "top_k": SamplingConfig(temperature=1.0, top_k=2)}
Limit = Callable[[Rule, Verdict, torch.Tensor, torch.Tensor, Draws], Verdict]


def tables(num_draft_tokens: int) -> dict[str, TableModel]:
    """Two of three tokens, and eight of two."""
    num_tables = 2 if num_draft_tokens == K else 8
    return {
        name: random_table(seed=seed, num_tables=num_tables, max_length=num_draft_tokens, vocab_size=3)
        for seed, name in enumerate(("target", "draft"), 1)
    }


def at_most(rule: Rule, found: Verdict, most_B1: torch.Tensor, target_BTV: torch.Tensor, draws: Draws) -> Verdict:
    return rule.at_most(found, most_B1, target_BTV, draws=draws)


def without_a_draw(_rule: Rule, found: Verdict, most_B1: torch.Tensor, _target: torch.Tensor, _draws: Draws) -> Verdict:
    """The next token is that after the whole path."""
    return found._replace(node_B1=found.node_B1.minimum(most_B1))


def where_more_pass(
    rule: Rule, found: Verdict, most_B1: torch.Tensor, target_BTV: torch.Tensor, draws: Draws
) -> Verdict:
    """A row that accepts as many keeps the token that follows a rejection."""
    return found.where(found.node_B1 > most_B1, at_most(rule, found, most_B1, target_BTV, draws))


def limited(rule: str, sampling: SamplingConfig, most: int, limit: Limit = at_most) -> Rule:
    """A rule whose rows accept no more than `most` tokens; the draw after them is the round's last."""
    made = make_rule(sampling, VerificationConfig(rule=rule))
    whole = made.verify

    def verify(draft: Draft, target_BTV: torch.Tensor, *, draws: Draws) -> Verdict:
        own = draws if draft.is_certain else draws._replace(plain_BTP=draws.residual_BP[:, None])
        most_B1 = torch.full((target_BTV.shape[0], 1), most)
        return limit(made, whole(draft, target_BTV, draws=draws), most_B1, target_BTV, own)

    made.verify = verify  # type: ignore[method-assign]
    return made


@grid(
    where=lambda drafts, most, **_: drafts != "certain" or most < 2,
    drafts=["speculative", "block", "certain"], name=[*SAMPLINGS], most=[0, 1, 2],
)  # fmt: skip
def test_fewer_drafted_tokens_keep_the_targets_law(drafts: str, name: str, most: int) -> None:
    """A token that is certain has a draw at each position, and two tokens have as many as others do with three."""
    is_certain = drafts == "certain"
    made, num = limited("speculative" if is_certain else drafts, SAMPLINGS[name], most), 2 if is_certain else K
    models = tables(num)
    assert law_error(made, SAMPLINGS[name], **models, num_draft_tokens=num, is_point_mass=is_certain) < 1e-12
    law_GNTV = round_verdicts(made, models["target"], models["draft"], num, is_point_mass=is_certain)[2]
    assert law_GNTV[:, :, most + 1 :].abs().max() == 0
    assert law_GNTV[:, :, most].max() > 0


@pytest.mark.parametrize("limit", [without_a_draw, where_more_pass])
def test_a_limit_without_a_draw_of_its_own_is_found(limit: Limit) -> None:
    made = limited("speculative", SAMPLINGS["temperature"], 1, limit)
    assert law_error(made, SAMPLINGS["temperature"], **tables(K), num_draft_tokens=K) > 1e-3
