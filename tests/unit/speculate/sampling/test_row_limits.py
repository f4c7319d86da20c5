"""Rows that take fewer drafted tokens than a round drafts: the exact law of the first tokens of a text.

Shapes: B rows, K drafted tokens, T = K + 1 positions, V = 3 tokens.
"""

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
Ends = Callable[[torch.Tensor], torch.Tensor]
"""Maps drafted tokens (B, K) to how many of them count (B, 1)."""
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


def before_the_token_after_one(ids_BK: torch.Tensor) -> torch.Tensor:
    """A draft ends after its first 1, but counts whole where only the last token is one."""
    goes_on_BK = torch.cat([torch.ones_like(ids_BK[:, :1]), (ids_BK[:, :-1] != 1).long()], dim=1)
    num_B1 = goes_on_BK.cumprod(1).sum(1, keepdim=True)
    return num_B1.masked_fill(num_B1 == ids_BK.shape[1], 2**31)


def at_once(ids_BK: torch.Tensor) -> torch.Tensor:
    """A draft ends before its first 1: a fault, since that token says whether it counts."""
    return (ids_BK != 1).long().cumprod(1).sum(1, keepdim=True)


def by_the_last(ids_BK: torch.Tensor) -> torch.Tensor:
    """One token counts if the last one is 1: a fault, since that one is drafted later."""
    return torch.where(ids_BK[:, -1:] == 1, 1, 2**31)


def limited(rule: str, sampling: SamplingConfig, most: int | Ends, limit: Limit = at_most) -> Rule:
    """A rule whose rows accept no more than `most` tokens; the draw after them is the round's last."""
    made = make_rule(sampling, VerificationConfig(rule=rule))
    whole = made.verify

    def verify(draft: Draft, target_BTV: torch.Tensor, *, draws: Draws) -> Verdict:
        own = draws if draft.is_certain else draws._replace(plain_BTP=draws.residual_BP[:, None])
        most_B1 = torch.full((target_BTV.shape[0], 1), most) if isinstance(most, int) else most(draft.ids_BK)
        return limit(made, whole(draft, target_BTV, draws=draws), most_B1, target_BTV, own)

    made.verify = verify  # type: ignore[method-assign]
    return made


@pytest.mark.seconds
@grid(
    where=lambda drafts, most, **_: drafts != "certain" or most < 2,
    drafts=["speculative", "block", "certain"],
    name=[*SAMPLINGS],
    most=[0, 1, 2],
)
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


@grid(drafts=["speculative", "block", "certain"], name=[*SAMPLINGS])
def test_drafts_that_end_by_tokens_before_keep_the_targets_law(drafts: str, name: str) -> None:
    is_certain = drafts == "certain"
    ends, num = before_the_token_after_one, 2 if is_certain else K
    made = limited("speculative" if is_certain else drafts, SAMPLINGS[name], ends)
    assert law_error(made, SAMPLINGS[name], **tables(num), num_draft_tokens=num, is_point_mass=is_certain) < 1e-12


@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("ends", [at_once, by_the_last])
def test_an_end_by_the_token_itself_or_a_later_one_is_found(ends: Ends, rule: str) -> None:
    """Where rejections decide by the tokens alone, later ones say nothing: `block` accepts by all of them."""
    made = limited(rule, SAMPLINGS["temperature"], ends)
    error = law_error(made, SAMPLINGS["temperature"], **tables(K), num_draft_tokens=K)
    assert error > 1e-3 or (ends is by_the_last and rule == "speculative" and error < 1e-12)
