"""Verifies drafts of rows that stand in two places: some have a block in flight, others have just left one.

The target scores K positions. A row with a block in flight has K - 1 drafted tokens at the first of them, and the first
token of the next block follows: all K are examined. A row without one has that first token alone.

    in flight        | d1 | d2 | d3 | next |     K = 4: four examined
    none in flight   | next |                    one examined

No bonus token follows an accepted draft: the rest of the next block is in flight already.

Shapes: B sequences, K drafted tokens, T = K + 1, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.sampling.rules import Draft, Rule, Verdict
from llama_ssp.sampling.uniforms import Draws


class AheadVerdict(NamedTuple):
    """A verdict whose next token follows `num_accepted_B1` others, and where all examined tokens were accepted.

    `goes_on_B1` is 1 in rows where the next token is the drafted one, so that the block behind it stays in flight.
    """

    verdict: Verdict
    goes_on_B1: Tensor


def verify_ahead(
    rule: Rule, in_flight: Draft, following: Draft, target_BKV: Tensor, *, ahead_B: Tensor, draws: Draws
) -> AheadVerdict:
    """Examine the tokens in flight and the first of the block that follows; see the module.

    Args:
        rule: decides as in any other round, once for K tokens and once for one.
        in_flight: the K - 1 tokens, and of their probabilities the first K - 1 rows; ignored in rows without.
        following: the next block, K tokens; only the first is examined.
        target_BKV: the output of the rule's `process` for the target's logits.
        ahead_B: K - 1 in rows with a block in flight, 0 in the others.
        draws: the uniforms of this round.
    """
    first_B1, first_probs_BTV = following.ids_BK[:, :1], None
    if following.probs_BTV is not None:
        probs_B1V = following.probs_BTV[:, :1]
        first_probs_BTV = torch.cat([probs_B1V, torch.zeros_like(probs_B1V)], dim=1)
    verdict = rule.verify(
        Draft(first_B1, first_probs_BTV),
        torch.cat([target_BKV[:, :1]] * 2, dim=1),
        draws=draws._replace(accept_BK=draws.accept_BK[:, :1]),
    )
    if in_flight.ids_BK.shape[1]:
        is_ahead_B1 = ahead_B[:, None] > 0
        whole = _whole(rule, in_flight, Draft(first_B1, first_probs_BTV), target_BKV, draws=draws)
        verdict = Verdict(*(torch.where(is_ahead_B1, *each) for each in zip(whole, verdict, strict=True)))
    goes_on_B1 = verdict.num_accepted_B1 > ahead_B[:, None]
    next_ids_B1 = torch.where(goes_on_B1, first_B1, verdict.next_ids_B1)
    goes_on_B1 = goes_on_B1.long()
    return AheadVerdict(
        Verdict(verdict.num_accepted_B1 - goes_on_B1, next_ids_B1, verdict.weights_B1), goes_on_B1=goes_on_B1
    )


def _whole(rule: Rule, in_flight: Draft, first: Draft, target_BKV: Tensor, *, draws: Draws) -> Verdict:
    """The verdict on what is in flight and the first of the next block; its bonus token, from any row, is dropped."""
    ids_BK, probs_BTV = torch.cat([in_flight.ids_BK, first.ids_BK], dim=1), None
    if in_flight.probs_BTV is not None and first.probs_BTV is not None:
        num_ahead = in_flight.ids_BK.shape[1]
        probs_BTV = torch.cat([in_flight.probs_BTV[:, :num_ahead], first.probs_BTV], dim=1)
    return rule.verify(Draft(ids_BK, probs_BTV), torch.cat([target_BKV, target_BKV[:, -1:]], dim=1), draws=draws)
