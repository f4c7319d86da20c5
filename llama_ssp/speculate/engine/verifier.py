"""Runs the verification rule on one rank and gives all ranks its decision.

Every rank runs the same loop and the same calls, and each token id comes from exactly one rank. So ranks cannot diverge
by rounding. By default one rank decides for all rows and broadcasts the decision. With a `BatchSplit` each rank decides
for its own rows, whose drafts it holds, and the decisions are gathered.

Shapes: B sequences, W = K + 1 positions, V vocabulary, P = 2 uniforms of a draw, R rows of this rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.shared import BatchSplit
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.rules import Draft, Rule, Verdict, verify_ahead
from llama_ssp.speculate.sampling.trees import (
    Topology,
    Tree,
    best_choices,
    drawn_choices,
    verify_certain,
    verify_tree,
)
from llama_ssp.speculate.sampling.uniforms import Draws

STOP_REQUESTED, NOT_A_NUMBER, GOES_ON = 1, 2, 4
"""Flags of `Decision.flags_B1`."""


class Decision(NamedTuple):
    """The outcome of a forward of the target, the same on all ranks.

    Attributes:
        num_accepted_B1: how many drafted tokens become text.
        next_ids_B1: the token that follows them.
        flags_B1: STOP_REQUESTED if the deciding rank is to stop, plus NOT_A_NUMBER in rows whose logits are NaN, plus
            GOES_ON where the next token is drafted too, so that the tokens behind it stay in flight (`overlap`).
    """

    num_accepted_B1: Tensor
    next_ids_B1: Tensor
    flags_B1: Tensor


class Verifier:
    """Draws and verifies tokens with a rule, and makes all ranks agree on the outcome.

    Args:
        comm: the ranks that must agree.
        verify_rank: the rank in `comm` that decides; with a split, only for tokens without a draft.
        split: divides the rows among ranks that each hold the draft; None lets `verify_rank` decide all.
    """

    def __init__(
        self, rule: Rule, *, comm: Comm, verify_rank: int, device: torch.device, split: BatchSplit | None = None
    ) -> None:
        self._rule = rule
        self.needs_context = rule.needs_context
        self.comm = comm
        self._verify_rank = verify_rank
        self._decides = comm.rank == verify_rank
        self._split = split
        self._stop_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def request_stop(self) -> None:
        """Attach a stop request to the next decision; it takes effect on the deciding rank only."""
        self._stop_11.fill_(STOP_REQUESTED)

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor, context: Context | None = None) -> Decision:
        """Sample one token for every row from the target's logits."""
        decision = None
        if self._decides:
            ids_B1, probs_BV = self._rule.draw(logits_BV, uniforms_BP, context)
            weights_B1 = (logits_BV if probs_BV is None else probs_BV).gather(1, ids_B1)
            decision = self._decision(Verdict(torch.zeros_like(ids_B1), ids_B1, weights_B1))
        return self._broadcast(decision, batch_size=uniforms_BP.shape[0])

    def process(self, logits_BWV: Tensor, context: Context | None = None) -> Tensor:
        """Process the target's logits for `verify`, for the rows that this rank decides."""
        if self._split:
            own = self._split.own_rows(logits_BWV.shape[0])
            return self._rule.process(logits_BWV[own], context and Context(*(each[own] for each in context)))
        return self._rule.process(logits_BWV, context) if self._decides else logits_BWV

    def verify(self, draft: Draft, target_BWV: Tensor, *, draws: Draws, is_plain_B1: Tensor | None = None) -> Decision:
        """Accept a prefix of the draft and choose the token that follows it; with a split, any rank can ask to stop.

        Where `is_plain_B1` nothing is accepted, and the next token is that of plain decoding.
        """
        batch_size, _ = draft.ids_BK.shape
        if not self._split:
            verdict = self._rule.verify(draft, target_BWV, draws=draws) if self._decides else None
            verdict = verdict and self._or_plain(verdict, is_plain_B1, target_BWV, draws)
            return self._broadcast(verdict and self._decision(verdict), batch_size=batch_size)
        own = self._split.own_rows(batch_size)
        packed_R3 = self._stop_11.new_empty(0, 3)
        if own.start < own.stop:
            own_draws = Draws(*(uniforms[own] for uniforms in draws))
            verdict = self._rule.verify(Draft(draft.ids_BK[own], draft.probs_BTV), target_BWV, draws=own_draws)
            is_plain_R1 = None if is_plain_B1 is None else is_plain_B1[own]
            verdict = self._or_plain(verdict, is_plain_R1, target_BWV, own_draws)
            packed_R3 = torch.cat([*self._decision(verdict)], dim=1)
        return _unpacked(self._split.gather(packed_R3, batch_size=batch_size))

    def verify_tree(
        self, tree: Tree, shape: Topology, draft: Draft, target_BTV: Tensor, *, draws: Draws,
        is_plain_B1: Tensor | None = None,
    ) -> tuple[Decision, Tensor]:  # fmt: skip
        """Accept a path of a tree; returns the decision, and the nodes (B, D) of the path (`TreeVerdict.path_BD`)."""
        packed_BX = self._stop_11.new_empty(draft.ids_BK.shape[0], 3 + tree.depth)
        if self._decides:
            if draft.probs_BTV is not None:
                verdict = verify_tree(tree, draft, target_BTV, draws=draws)
            else:
                takes_best = self._rule.takes_best
                chosen = best_choices(target_BTV) if takes_best else drawn_choices(target_BTV, draws)
                verdict = verify_certain(shape, draft, *chosen)
            num_accepted_B1, path_BD, *others = verdict
            chain = Verdict(num_accepted_B1, *others)
            decision = self._decision(self._or_plain(chain, is_plain_B1, target_BTV, draws))
            if self.comm.size == 1:
                return decision, path_BD
            packed_BX = torch.cat([*decision, path_BD], dim=1)
        packed_BX = self.comm.broadcast(packed_BX, src=self._verify_rank)
        return _unpacked(packed_BX[:, :3]), packed_BX[:, 3:]

    def verify_ahead(
        self, in_flight: Draft, following: Draft, target_BKV: Tensor, *, ahead_B: Tensor, draws: Draws
    ) -> Decision:
        """Examine what is in flight and the first token behind it; see `rules.verify_ahead`."""
        decision = None
        if self._decides:
            verdict, goes_on_B1 = verify_ahead(
                self._rule, in_flight, following, target_BKV, ahead_B=ahead_B, draws=draws
            )
            decision = self._decision(verdict)
            decision.flags_B1.add_(goes_on_B1, alpha=GOES_ON)
        return self._broadcast(decision, batch_size=ahead_B.shape[0])

    def _or_plain(
        self, verdict: Verdict, is_plain_B1: Tensor | None, target_BTV: Tensor, draws: Draws
    ) -> Verdict:  # fmt: skip
        if is_plain_B1 is None:
            return verdict
        ids_B1 = self._rule.choose(target_BTV[:, 0], draws.plain_BP)
        plain = Verdict(torch.zeros_like(ids_B1), ids_B1, target_BTV[:, 0].gather(1, ids_B1))
        return Verdict(*(torch.where(is_plain_B1, *each) for each in zip(plain, verdict, strict=True)))

    def _decision(self, verdict: Verdict) -> Decision:
        num_accepted_B1, next_ids_B1, weights_B1 = verdict
        is_nan_B1 = weights_B1 != weights_B1  # noqa: PLR0124 - true only for NaN
        return Decision(num_accepted_B1, next_ids_B1, torch.add(self._stop_11, is_nan_B1, alpha=NOT_A_NUMBER))

    def _broadcast(self, decision: Decision | None, *, batch_size: int) -> Decision:
        """Send the decision to all ranks in one message of 3 numbers per row."""
        if decision and self.comm.size == 1:
            return decision
        packed_B3 = torch.cat([*decision], dim=1) if decision else self._stop_11.new_empty(batch_size, 3)
        return _unpacked(self.comm.broadcast(packed_B3, src=self._verify_rank))


def _unpacked(packed_B3: Tensor) -> Decision:
    return Decision(*packed_B3.split_with_sizes([1, 1, 1], dim=1))
