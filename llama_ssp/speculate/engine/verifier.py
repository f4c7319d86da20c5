"""Runs the verification rule on one rank and gives all ranks its decision.

Every rank runs the same loop and the same calls, and each token id comes from exactly one rank. So ranks cannot diverge
by rounding. By default one rank decides for all rows and broadcasts the decision. With a `BatchSplit` each rank decides
for its own rows, whose drafts it holds, and the decisions are gathered. Where the rule reads logits over shards, all
ranks with a part of them run it together, and the decision of one counts.

Shapes: B sequences, W = K + 1 positions, V vocabulary, P = 2 uniforms of a draw, R rows of this rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.shared import BatchSplit
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.rules import Draft, ForcedLengths, Rule, Verdict
from llama_ssp.speculate.sampling.trees import Topology, Tree, verify_path
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
        path_BD: see `Verdict`.
    """

    num_accepted_B1: Tensor
    next_ids_B1: Tensor
    flags_B1: Tensor
    path_BD: Tensor | None = None


class Verifier:
    """Draws and verifies tokens with a rule, and makes all ranks agree on the outcome.

    Args:
        comm: the ranks that must agree.
        verify_rank: the rank in `comm` that decides; with a split, only for tokens without a draft.
        split: divides the rows among ranks that each hold the draft; None lets `verify_rank` decide all.
        tree: of the drafts; None for chains.
        forced: decides what is accepted, once the rule has; None leaves it to the rule.

    Attributes:
        rule: of all decisions.
    """

    def __init__(
        self, rule: Rule, *, comm: Comm, verify_rank: int, device: torch.device, split: BatchSplit | None = None,
        tree: Tree | None = None, forced: ForcedLengths | None = None,
    ) -> None:  # fmt: skip
        self.forced = forced
        self.rule, self.needs_context = rule, rule.needs_context
        self.comm, self.tree = comm, tree
        self._verify_rank = verify_rank
        self._decides = comm.rank == verify_rank
        self._runs_rule = self._decides or not rule.shard.is_whole
        self._split = split
        self._stop_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def request_stop(self) -> None:
        """Attach a stop request to the next decision; it takes effect on the deciding rank only."""
        self._stop_11.fill_(STOP_REQUESTED)

    def draw(self, logits_BV: Tensor, uniforms_BP: Tensor, context: Context | None = None) -> Decision:
        """Sample one token for every row from the target's logits."""

        def drawn() -> Verdict:
            ids_B1, probs_BV = self.rule.draw(logits_BV, uniforms_BP, context)
            weights_B1 = self.rule.weights(logits_BV if probs_BV is None else probs_BV, ids_B1)
            return Verdict(torch.zeros_like(ids_B1), ids_B1, weights_B1)

        return self.decide(drawn, batch_size=uniforms_BP.shape[0])

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        """Process the target's logits for `verify`, for the rows that this rank decides."""
        if self._split:
            own = self._split.own_rows(logits_BTV.shape[0])
            return self.rule.process(logits_BTV[own], context and Context(*(part[own] for part in context)))
        return self.rule.process(logits_BTV, context) if self._runs_rule else logits_BTV

    def verify(
        self, draft: Draft, target_BTV: Tensor, *, draws: Draws, shape: Topology | None = None,
        is_plain_B1: Tensor | None = None, forced_B1: Tensor | None = None,
    ) -> Decision:  # fmt: skip
        """Accept a path of the draft and choose the token that follows it; with a split, any rank can ask to stop.

        `shape` is the topology of a tree. Where `is_plain_B1` nothing is accepted, and the next token is that of plain
        decoding; elsewhere `forced_B1` tokens are, if it is given.
        """
        batch_size = draft.ids_BK.shape[0]
        if not self._split:
            return self.decide(
                lambda: self._verdict(
                    draft, target_BTV, draws, shape, is_plain_B1=is_plain_B1, forced_B1=forced_B1
                ),
                batch_size=batch_size, depth=self.tree.depth if self.tree else 0,
            )  # fmt: skip
        own = self._split.own_rows(batch_size)
        packed_R3 = self._stop_11.new_empty(0, 3)
        if own.start < own.stop:
            own_draws = Draws(*(uniforms[own] for uniforms in draws))
            is_plain_R1, forced_R1 = (None if part is None else part[own] for part in (is_plain_B1, forced_B1))
            of_rows = Draft(draft.ids_BK[own], draft.probs_BTV)
            verdict = self._verdict(of_rows, target_BTV, own_draws, None, is_plain_B1=is_plain_R1, forced_B1=forced_R1)
            packed_R3 = _packed(self._decision(verdict))
        return _unpacked(self._split.gather(packed_R3, batch_size=batch_size))

    def decide(self, find: Callable[[], Verdict], *, batch_size: int, depth: int = 0) -> Decision:
        """Find a verdict on the ranks that run the rule, and give all ranks the decision of one in one message.

        The path of a verdict has `depth` nodes.
        """
        decision = self._decision(find()) if self._runs_rule else None
        if decision and self.comm.size == 1:
            return decision
        packed_BX = _packed(decision) if decision else self._stop_11.new_empty(batch_size, 3 + depth)
        return _unpacked(self.comm.broadcast(packed_BX, src=self._verify_rank), depth=depth)

    def _verdict(
        self, draft: Draft, target_BTV: Tensor, draws: Draws, shape: Topology | None, *,
        is_plain_B1: Tensor | None, forced_B1: Tensor | None,
    ) -> Verdict:  # fmt: skip
        if self.tree and shape:
            verdict = verify_path(self.rule, self.tree, shape, draft, target_BTV, draws=draws)
        else:
            verdict = self.rule.verify(draft, target_BTV, draws=draws)
        if forced_B1 is not None:
            verdict = self.rule.accepting(forced_B1, target_BTV, draws=draws)
        return self.rule.or_plain(verdict, is_plain_B1, target_BTV, draws=draws)

    def _decision(self, verdict: Verdict) -> Decision:
        is_nan_B1 = verdict.weights_B1 != verdict.weights_B1
        flags_B1 = torch.add(self._stop_11, is_nan_B1, alpha=NOT_A_NUMBER)
        if verdict.goes_on_B1 is not None:
            flags_B1.add_(verdict.goes_on_B1, alpha=GOES_ON)
        return Decision(verdict.num_accepted_B1, verdict.next_ids_B1, flags_B1, verdict.path_BD)


def _packed(decision: Decision) -> Tensor:
    return torch.cat([part for part in decision if part is not None], dim=1)


def _unpacked(packed_BX: Tensor, *, depth: int = 0) -> Decision:
    return Decision(*packed_BX.split_with_sizes([1, 1, 1, *[depth] * (depth > 0)], dim=1))
