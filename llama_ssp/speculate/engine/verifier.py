"""Runs the verification rule on one rank and gives all ranks its decision.

Every rank runs the same loop and the same calls, and each token id comes from exactly one rank. So ranks cannot diverge
by rounding. By default one rank decides for all rows and broadcasts the decision. With a `BatchSplit` each rank decides
for its own rows, whose drafts it holds, and the decisions are gathered. Where the rule reads logits over shards, all
ranks with a part of them run it together, and the decision of one counts.

Shapes: B sequences, W = K + 1 positions, V vocabulary, P = 2 uniforms of a draw, R rows of this rank, X words of
a mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.shared import BatchSplit
from llama_ssp.speculate.engine.masks import forbidden
from llama_ssp.speculate.sampling.context import Context
from llama_ssp.speculate.sampling.draft import Draft, Verdict
from llama_ssp.speculate.sampling.rules import ForcedLengths, Rule
from llama_ssp.speculate.sampling.uniforms import Draws

STOP_REQUESTED, NOT_A_NUMBER, GOES_ON, NEWS, EMPTY = 1, 2, 4, 8, 16
"""Flags of `Decision.flags_B1`."""


class Decision(NamedTuple):
    """The outcome of a forward of the target, the same on all ranks.

    Attributes:
        node_B1: see `Verdict`.
        next_ids_B1: the token that follows.
        flags_B1: the sum of STOP_REQUESTED or NEWS if the deciding rank has announced it, NOT_A_NUMBER in rows whose
            logits are NaN, EMPTY in rows whose masks and bans leave no token, and GOES_ON in rows whose next token is
            drafted too, so that the tokens after it stay in flight (`overlap`).
    """

    node_B1: Tensor
    next_ids_B1: Tensor
    flags_B1: Tensor


class Verifier:
    """Draws and verifies tokens with a rule, and makes all ranks agree on the outcome.

    Args:
        comm: the ranks that must agree.
        verify_rank: the rank in `comm` that decides; with a split, only for tokens without a draft.
        split: divides the rows among ranks that each hold the draft; None lets `verify_rank` decide all.
        forced: decides the accepted lengths in place of the rule; None leaves them to it.

    Attributes:
        rule, verify_rank: of all decisions.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        comm: Comm,
        verify_rank: int,
        device: torch.device,
        split: BatchSplit | None = None,
        forced: ForcedLengths | None = None,
    ) -> None:
        self.forced = forced
        self.rule, self.needs_context = rule, rule.needs_context
        self.comm = comm
        self.verify_rank = verify_rank
        self._decides = comm.rank == verify_rank
        self._runs_rule = self._decides or not rule.shard.is_whole
        self._split = split
        self._announced, self._flags_11 = 0, torch.zeros(1, 1, dtype=torch.int64, device=device)

    @property
    def is_split(self) -> bool:
        """Whether several ranks decide, each for rows of its own."""
        return self._split is not None

    def own_rows(self, batch_size: int) -> slice:
        """The rows that this rank decides; all without a split."""
        return self._split.own_rows(batch_size) if self._split else slice(0, batch_size)

    def announce(self, flags: int) -> None:
        """Attach flags to the next decisions; they take effect on the deciding rank only."""
        if flags != self._announced:
            self._announced = flags
            self._flags_11.fill_(flags)

    def rows_with_masks(self, batch_size: int) -> slice:
        """Return the rows whose masks this rank needs, because it processes their logits."""
        return self.own_rows(batch_size) if self._split or self._runs_rule else slice(0, 0)

    def process(self, logits_BTV: Tensor, context: Context | None = None) -> Tensor:
        """Process the target's logits before `decide`, on the ranks that run the rule."""
        return self.rule.process(logits_BTV, context) if self._runs_rule else logits_BTV

    def verify(
        self,
        draft: Draft,
        logits_BTV: Tensor,
        context: Context | None = None,
        *,
        draws: Draws,
        bits_BTX: Tensor | None = None,
        forced_B1: Tensor | None = None,
    ) -> Decision:
        """Accept a path of the draft, which can be empty, and choose the next token; a draft may have no tokens.

        The logits are the target's after the last token and after each node, `bits_BTX` the masks at the same
        positions. `forced_B1`, if given, is how many tokens are accepted regardless of the target. If the rows are
        split over ranks, each rank decides for its own rows, and any rank can ask to stop.
        """
        given = draft.ids_BK, logits_BTV, context, bits_BTX, draws, draft.num_B1, forced_B1

        def find(own: slice | None) -> tuple[Verdict, Tensor | None]:
            of_rows: tuple[Any, ...] = given if own is None else tuple(_of_rows(part, own) for part in given)
            ids, logits, before, bits, drawn, num_B1, forced = of_rows
            drafted, nothing_BT = draft._replace(ids_BK=ids), None  # with a split, its law is of these rows alone
            if bits is None:
                target = self.rule.process(logits, before)
            else:
                is_forbidden = forbidden(bits, self.rule.shard.ids(logits.shape[-1]))
                target, nothing_BT = self.rule.process_allowed(logits, before, is_forbidden)
            verdict = self.rule.verify(drafted, target, draws=drawn)
            if forced is not None:
                verdict = self.rule.accepting(forced, target, draws=drawn)
            if isinstance(num_B1, Tensor):
                verdict = self.rule.at_most(verdict, num_B1, target, draws=drawn)
            if nothing_BT is not None:  # the best token of none may be the drafted one
                verdict = verdict._replace(node_B1=drafted.nodes.until(nothing_BT, verdict.node_B1))
            return verdict, nothing_BT

        return self.decide(find, batch_size=len(draft.ids_BK))

    def decide(self, find: Callable[[slice | None], tuple[Verdict, Tensor | None]], *, batch_size: int) -> Decision:
        """Find the verdict on the ranks that run the rule, for all rows or their own; give all ranks the decision.

        With masks, `find` also returns which positions (B, T) leave no token.
        """
        if self.comm.size == 1:
            return self._decision(*find(None))
        own = self.rows_with_masks(batch_size)
        packed_R3 = self._flags_11.new_empty(0 if self._split else batch_size, 3)
        if own.start < own.stop:
            packed_R3 = torch.cat(self._decision(*find(own if self._split else None)), dim=1)
        if self._split:
            return _unpacked(self._split.gather(packed_R3, batch_size=batch_size))
        return _unpacked(self.comm.broadcast(packed_R3, src=self.verify_rank))

    def _decision(self, verdict: Verdict, nothing_BT: Tensor | None = None) -> Decision:
        is_nan_B1 = verdict.weights_B1 != verdict.weights_B1
        flags_B1 = torch.add(self._flags_11, is_nan_B1, alpha=NOT_A_NUMBER)
        if nothing_BT is not None:
            flags_B1 = torch.add(flags_B1, nothing_BT.gather(1, verdict.node_B1), alpha=EMPTY)
        return Decision(*verdict[:2], flags_B1)


def _unpacked(packed_B3: Tensor) -> Decision:
    return Decision(*packed_B3.split(1, dim=1))


def _of_rows(part: Any, rows: slice) -> Any:  # noqa: ANN401 - None, a tensor, or tensors with a name
    if isinstance(part, Draws):
        return Draws(*(one[rows] for one in part))
    return part.some(rows) if isinstance(part, Context) else part if part is None else part[rows]
