"""Faults of speculative decoding that change the distribution of its text, planted into the rules for one test."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.speculate.sampling import context, rules, shards, trees, uniforms
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.processors import draw

Verify = Callable[..., Verdict]


def wrong_residual(verify: Verify) -> Verify:
    """After a rejection the next token is drawn from the target instead of the residual."""

    def faulty(draft: Draft, target_BTV: Tensor, **draws: Any) -> Verdict:
        verdict = verify(draft, target_BTV.clone(), **draws)
        at_B11 = verdict.node_B1[..., None]
        target_BV = target_BTV.gather(1, at_B11.expand(-1, 1, target_BTV.shape[2]))[:, 0]
        wrong_B1 = draw(target_BV, draws["draws"].residual_BP)
        is_bonus_B1 = verdict.node_B1 == draft.ids_BK.shape[1]
        return verdict._replace(next_ids_B1=torch.where(is_bonus_B1, verdict.next_ids_B1, wrong_B1))

    return faulty


def biased(factor: float) -> Callable[[Verify], Verify]:
    """Acceptance compares u times a factor."""
    return with_draws(lambda draws: draws._replace(accept_BK=draws.accept_BK * factor))


def with_draws(change: Callable[[uniforms.Draws], uniforms.Draws]) -> Callable[[Verify], Verify]:
    """The rule reads other uniforms."""

    def plant(verify: Verify) -> Verify:
        return lambda draft, target_BTV, *, draws: verify(draft, target_BTV, draws=change(draws))

    return plant


def bonus_of_draft(rule: rules.Rule, draft: Draft, target_BTV: Tensor, *, draws: uniforms.Draws) -> Verdict:
    """The last drafted token is the bonus token of a draft without it, and is not verified."""
    num, law = draft.ids_BK.shape[1] - 1, draft.law
    if not draft.is_certain:
        law = torch.cat([draft.drawn_law[:, :num], torch.zeros_like(draft.drawn_law[:, :1])], dim=1)
    shorter, shorter_BTV = Draft(draft.ids_BK[:, :num], law), target_BTV[:, : num + 1].contiguous()
    verdict = _verify(rule, shorter, shorter_BTV, draws=draws._replace(accept_BK=draws.accept_BK[:, :num]))
    is_bonus_B1 = verdict.node_B1 == num
    return verdict._replace(next_ids_B1=torch.where(is_bonus_B1, draft.ids_BK[:, num:], verdict.next_ids_B1))


def weightless_residual(verify: Verify) -> Verify:
    """After a rejection the residual is (p - q)+, where a block's is (w p - q)+."""

    def faulty(draft: Draft, target_BTV: Tensor, *, draws: uniforms.Draws) -> Verdict:
        verdict = verify(draft, target_BTV.clone(), draws=draws)
        at_B11 = verdict.node_B1[..., None]
        target_BV, draft_BV = (
            probs_BTV.gather(1, at_B11.expand(-1, 1, probs_BTV.shape[2]))[:, 0]
            for probs_BTV in (target_BTV, draft.drawn_law)
        )
        rest_BV = (target_BV - draft_BV).clamp_min(0)
        return rules.draw_next(verdict.node_B1, rest_BV, target_BV, draws.residual_BP)

    return faulty


def shared_uniforms(verify: Verify) -> Verify:
    """The token in the place of a rejected one is drawn by the numbers that have drawn the rejected one."""

    def faulty(draft: Draft, target_BTV: Tensor, *, draws: uniforms.Draws) -> Verdict:
        at_B11 = verify(draft, target_BTV.clone(), draws=draws).node_B1[..., None]
        uniforms_BTP = torch.cat([draws.draft_BKP, draws.residual_BP[:, None]], dim=1)
        shared_BP = uniforms_BTP.gather(1, at_B11.expand(-1, 1, uniforms_BTP.shape[2]))[:, 0]
        return verify(draft, target_BTV, draws=draws._replace(residual_BP=shared_BP))

    return faulty


def race(weights_BV: Tensor, uniforms_BP: Tensor, *, units: float = 0.0) -> Tensor:
    """Draw by a race of all tokens (Gumbel-max), whose noise is a function of the first uniform."""
    keys_B = (uniforms_BP[:, 0] * 2.0**53).long()
    noise_BTV = uniforms.exponentials(keys_B, torch.zeros_like(keys_B)[:, None], vocab_size=weights_BV.shape[1])
    return (weights_BV / noise_BTV[:, 0]).argmax(-1, keepdim=True)


_OF_VERIFICATION = {
    "wrong residual": wrong_residual,
    "u x 0.95": biased(0.95),
    "u x 1.05": biased(1.05),
    "weightless residual": weightless_residual,
    "shared uniforms": shared_uniforms,
    # The key of the residual's draw is that of the acceptance: both read the same numbers.
    "shifted key": with_draws(lambda draws: draws._replace(residual_BP=draws.accept_BK[:, :2].contiguous())),
    # The acceptance reads the numbers that have drawn the drafted tokens.
    "acceptance by the draft's key": with_draws(
        lambda draws: draws._replace(accept_BK=draws.draft_BKP[:, :, 0].contiguous())
    ),
}


def _forgetful(context: Context, first_B: Tensor, *, vocab_size: int) -> Tensor:
    """Of several scored positions all know what the first one knows."""
    first = context._replace(last_BT=context.last_BT[:, :1])
    return _count_tokens(first, first_B, vocab_size=vocab_size).expand(-1, context.last_BT.shape[1], -1)


def _of_first_round(table: uniforms.UniformTable, keys: Tensor, starts: Tensor) -> Tensor:
    """Every round reads the uniforms of the first."""
    return _uniforms(table, keys, torch.zeros_like(starts))


def _by_round(keys_B: Tensor, positions_BT: Tensor, **tokens: int) -> Tensor:
    """All positions of a round run the race of the first."""
    return _exponentials(keys_B, positions_BT[:, :1].expand_as(positions_BT), **tokens)


def _kept(laws: trees.NodeLaws, _ids_X1: Tensor | None) -> trees.NodeLaws:
    """The draft's law of the next sibling still has the rejected one."""
    return _without(laws, None)


_without, _verify = trees.NodeLaws.without, rules.Rule.verify
_count_tokens, _exponentials, _uniforms = context.count_tokens, uniforms.exponentials, uniforms.UniformTable.uniforms
_ELSEWHERE: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "forgetful penalty": (context, "count_tokens", _forgetful),
    "key of the run": (uniforms.UniformTable, "uniforms", _of_first_round),
    "key of the round": (rules, "exponentials", _by_round),
    "kept sibling": (trees.NodeLaws, "without", _kept),
    "bonus of the draft": (rules.Rule, "verify", bonus_of_draft),
}


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "shared race":
        monkeypatch.setattr(shards, "draw", race)
        fault = "shared uniforms"
    if fault in _ELSEWHERE:
        monkeypatch.setattr(*_ELSEWHERE[fault])
        return
    for name in ("verify_speculative", "verify_block"):
        monkeypatch.setattr(rules, name, _OF_VERIFICATION[fault](getattr(rules, name)))
