"""Faults of speculative decoding that change the distribution of its text, planted into the rules for one test."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_ssp.speculate.sampling import context, rules, uniforms
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.processors import draw
from llama_ssp.speculate.sampling.rules import Draft, Verdict

Verify = Callable[..., Verdict]


def wrong_residual(verify: Verify) -> Verify:
    """After a rejection the next token is drawn from the target instead of the residual."""

    def faulty(draft: Draft, target_BTV: Tensor, **draws: Any) -> Verdict:  # noqa: ANN401
        verdict = verify(draft, target_BTV.clone(), **draws)
        at_B11 = verdict.num_accepted_B1[..., None]
        target_BV = target_BTV.gather(1, at_B11.expand(-1, 1, target_BTV.shape[2]))[:, 0]
        wrong_B1 = draw(target_BV, draws["draws"].residual_BP)
        is_bonus_B1 = verdict.num_accepted_B1 == draft.ids_BK.shape[1]
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


def bonus_of_draft(verify: Verify) -> Verify:
    """The last drafted token is the bonus token of a draft without it, and is not verified."""

    def faulty(draft: Draft, target_BTV: Tensor, **draws: Any) -> Verdict:  # noqa: ANN401
        num, probs_BTV = draft.ids_BK.shape[1] - 1, draft.probs_BTV
        if probs_BTV is not None:
            probs_BTV = torch.cat([probs_BTV[:, :num], torch.zeros_like(probs_BTV[:, :1])], dim=1)
        if draws:
            draws = {"draws": draws["draws"]._replace(accept_BK=draws["draws"].accept_BK[:, :num])}
        verdict = verify(Draft(draft.ids_BK[:, :num], probs_BTV), target_BTV[:, : num + 1].contiguous(), **draws)
        is_bonus_B1 = verdict.num_accepted_B1 == num
        return verdict._replace(next_ids_B1=torch.where(is_bonus_B1, draft.ids_BK[:, num:], verdict.next_ids_B1))

    return faulty


_OF_VERIFICATION = {
    "wrong residual": wrong_residual,
    "u x 0.95": biased(0.95),
    "u x 1.05": biased(1.05),
    "bonus of the draft": bonus_of_draft,
    # The key of the residual's draw is that of the acceptance: both read the same numbers.
    "shifted key": with_draws(lambda draws: draws._replace(residual_BP=draws.accept_BK[:, :2].contiguous())),
    # The acceptance reads the numbers that have drawn the drafted tokens.
    "acceptance by the draft's key": with_draws(
        lambda draws: draws._replace(accept_BK=draws.draft_BKP[:, :, 0].contiguous())
    ),
}
FAULTS = (*_OF_VERIFICATION, "forgetful penalty", "key of the run", "key of the round")


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant one of `FAULTS`, before a decoder is made."""
    if fault in _OF_VERIFICATION:
        names = ("verify_speculative", "verify_block", *(["verify_greedy"] if fault == "bonus of the draft" else []))
        for name in names:
            monkeypatch.setattr(rules, name, _OF_VERIFICATION[fault](getattr(rules, name)))
    elif fault == "forgetful penalty":
        count = context.count_tokens

        def forgetful(context: Context, first_B: Tensor, *, vocab_size: int) -> Tensor:
            """Of several scored positions all know what the first one knows."""
            first = context._replace(last_BT=context.last_BT[:, :1])
            return count(first, first_B, vocab_size=vocab_size).expand(-1, context.last_BT.shape[1], -1)

        monkeypatch.setattr(context, "count_tokens", forgetful)
    elif fault == "key of the run":
        all_uniforms = uniforms.UniformTable.uniforms

        def same(table: uniforms.UniformTable, keys: Tensor, starts: Tensor) -> Tensor:
            """Every round reads the uniforms of the first."""
            return all_uniforms(table, keys, torch.zeros_like(starts))

        monkeypatch.setattr(uniforms.UniformTable, "uniforms", same)
    else:
        race = uniforms.exponentials

        def by_round(keys_B: Tensor, positions_BT: Tensor, *, vocab_size: int) -> Tensor:
            """All positions of a round run the race of the first."""
            return race(keys_B, positions_BT[:, :1].expand_as(positions_BT), vocab_size=vocab_size)

        monkeypatch.setattr(rules, "exponentials", by_round)
