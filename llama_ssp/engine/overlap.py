"""Rounds in which drafting overlaps verification: while the target verifies a block, the draft goes on from it.

The draft holds ranks of its own. In every round it drafts K tokens behind the K - 1 that are in flight, which the
target scores at the same time. All of them and the first new token are then verified:

    K = 4               L-1   L    L+1   L+2   L+3   L+4   L+5   L+6
    the target reads     t    d1    d2    d3
    the draft writes                             e0    e1    e2    e3
    all accepted              d1    d2    d3     e0 |  e1    e2    e3  in flight in the next round, no bonus token
    d2 is rejected            d1    x |                                all others are dropped
    next, none in flight
    the target reads          ..    x     -     -     -                only the score after x counts
    the draft writes                      e0    e1    e2    e3

So every row gains at least one token in a round, a row without a block in flight has the first token of the new one
verified at once, and rows of a batch stand in either place. A round is a fixed sequence of four pieces, and only the
last two need what other ranks did:

    draft          on the draft's ranks
    score_flight   on the target's ranks, at the same time
    exchange       ids to all ranks, probabilities to the rank that verifies
    settle         the rule, its decision to all ranks, commit

Where drafting is fast, the round after a rejection can wait for a block instead (`OverlappedRound.waits`): the draft
first writes K - 1 tokens, with uniforms of their own, while the target does nothing. All rows then have a block in
flight, and every round examines K tokens.

A round begins at a length that no other round of its row begins at, since every round adds a token; its uniforms are
keyed by that length. What is dropped takes its uniforms with it, and no uniform decides twice.

Source: Liu et al. 2024, arXiv:2408.11850, whose pre-verify and post-verify happen here in one kind of round.

Shapes: B sequences, K drafted tokens, T = K + 1, V vocabulary, N uniforms of a round; L is a row's length.
"""

import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from llama_ssp.drafting.ahead import AheadDrafter
from llama_ssp.engine.clock import Clock
from llama_ssp.engine.round import Block, DraftChoice, Round
from llama_ssp.engine.state import BatchState
from llama_ssp.engine.verifier import GOES_ON, Verifier
from llama_ssp.models.runner import Runner
from llama_ssp.sampling.context import Rows
from llama_ssp.sampling.rules import Draft
from llama_ssp.sampling.uniforms import UniformTable


class OverlappedExecutor(ABC):
    """Runs the pieces of an overlapped round; an `OverlappedRound` is its own eager executor."""

    keeps_state = False

    @abstractmethod
    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """Draft K tokens behind those in flight, on the draft's ranks."""

    @abstractmethod
    def score_flight(self, state: BatchState, *, num_drafted: int, bucket: int) -> Tensor:
        """Score the last token and those in flight, on the target's ranks; returns the rule's view (B, K, V)."""

    @abstractmethod
    def exchange(self, state: BatchState, block: Block) -> Block:
        """Give each rank what it needs of the new block."""

    @abstractmethod
    def settle(
        self, state: BatchState, before: Block | None, following: Block, target_BKV: Tensor
    ) -> tuple[Tensor, Block]:
        """Verify, commit, and say which rows keep the following block.

        `before` was drafted in the round before: of its probabilities all but the first row belong to what is in
        flight. It is None before the first round. Returns the result (B, K + 2), which has the tokens in flight and
        then the decision, and what the next round finds in flight.
        """

    @abstractmethod
    def refill(self, state: BatchState, before: Block | None, fresh: Block) -> Block:
        """Put the exchanged block of K - 1 tokens in flight in rows that have none; returns what is in flight now."""

    @property
    @abstractmethod
    def drafts_here(self) -> bool:
        """Whether this rank has a part of the draft, and so none of the target."""


def overlapped_step(
    executor: OverlappedExecutor,
    state: BatchState,
    before: Block | None,
    *,
    choice: DraftChoice,
    bucket: int,
    clock: Clock,
    refills: bool = False,
) -> tuple[Tensor, Block]:
    """Run one overlapped round; `before` is the block that the round before has drafted, None at first. See `step`.

    With `refills`, rows without a block in flight get one first.
    A rank's time in the exchange, on the draft's ranks also in `settle`, is spent waiting for the other model.
    """
    if refills and choice.num_tokens > 1:
        fresh = executor.draft(state, choice=choice._replace(num_tokens=choice.num_tokens - 1), bucket=bucket)
        clock.lap("draft", waits=not executor.drafts_here)
        fresh = executor.exchange(state, fresh)
        clock.lap("draft", waits=True)
        before = executor.refill(state, before, fresh)
    ran_s = time.thread_time()
    following = executor.draft(state, choice=choice, bucket=bucket)
    clock.lap("draft")
    if executor.drafts_here:
        clock.draft_cpu_s += time.thread_time() - ran_s
    target_BKV = executor.score_flight(state, num_drafted=choice.num_tokens - 1, bucket=bucket)
    clock.lap("verify")
    following = executor.exchange(state, following)
    clock.lap("draft", waits=True)
    result, in_flight = executor.settle(state, before, following, target_BKV)
    clock.lap("verify", waits=executor.drafts_here)
    return result, in_flight


class OverlappedRound(Round, OverlappedExecutor):
    """A round whose drafter works while the target verifies; it never decodes without a draft.

    Attributes:
        waits: a row whose draft was rejected waits for a new block, instead of having its first token verified early.
            None, which is not to wait, before anybody has chosen.
    """

    def __init__(self, target: Runner, drafter: AheadDrafter, *, verifier: Verifier) -> None:
        super().__init__(target, drafter, verifier=verifier)
        self.waits = None
        self._drafter = drafter
        self._num_drafted = drafter.num_draft_tokens
        self.num_ahead = self._num_drafted - 1
        self.uniforms = UniformTable(self._num_drafted + self.num_ahead, target.device)
        self.in_flight_A = torch.arange(self.num_ahead, device=target.device)

    @property
    def drafts_here(self) -> bool:
        """See `OverlappedExecutor`."""
        return self._drafter.drafts_here

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """See `OverlappedExecutor`."""
        uniforms_BN = state.uniforms()
        # A block of K - 1 tokens precedes the one of K in the same round, with the uniforms behind those of the latter.
        first = 0 if choice.num_tokens == self._num_drafted else self._num_drafted
        uniforms_BKP = self.uniforms.split(uniforms_BN).draft_BKP[:, first : first + choice.num_tokens]
        draft = self._drafter.propose(_behind_flight(state), uniforms_BKP=uniforms_BKP, bucket=bucket)
        return Block(choice, uniforms_BN, *draft)

    def score_flight(self, state: BatchState, *, num_drafted: int, bucket: int) -> Tensor:
        """See `OverlappedExecutor`."""
        return self.verifier.process(*self.score(state, num_drafted=num_drafted, bucket=bucket))

    def exchange(self, state: BatchState, block: Block) -> Block:
        """See `OverlappedExecutor`."""
        draft = self._drafter.exchange(Draft(block.ids_BK, block.probs_BWV), _behind_flight(state))
        return Block(block.choice, block.uniforms_BN, *draft)

    def refill(self, state: BatchState, before: Block | None, fresh: Block) -> Block:
        """See `OverlappedExecutor`."""
        is_fresh_B, probs_BTV = state.ahead_B == 0, fresh.probs_BWV
        if probs_BTV is not None:
            probs_BTV = torch.cat([probs_BTV[:, :1], probs_BTV], dim=1)  # as in a block of K, whose first is examined
            if before is not None and before.probs_BWV is not None:
                probs_BTV = torch.where(is_fresh_B[:, None, None], probs_BTV, before.probs_BWV)
        state.ahead_B.fill_(self.num_ahead)
        return fresh._replace(probs_BWV=probs_BTV)

    def settle(
        self, state: BatchState, before: Block | None, following: Block, target_BKV: Tensor
    ) -> tuple[Tensor, Block]:
        """See `OverlappedExecutor`."""
        # Before the first round nothing is in flight in any row, so that the values of `before` do not count.
        return self.decide(state, following if before is None else before, following, target_BKV), following

    def decide(self, state: BatchState, before: Block, following: Block, target_BKV: Tensor) -> Tensor:
        """Verify and commit; see `OverlappedExecutor.settle` for the result."""
        flying_BA = state.tokens_BS.gather(1, state.lengths_B[:, None] + self.in_flight_A)
        in_flight = Draft(flying_BA, None if before.probs_BWV is None else before.probs_BWV[:, 1:])
        decision = self.verifier.verify_ahead(
            in_flight,
            Draft(following.ids_BK, following.probs_BWV),
            target_BKV,
            ahead_B=state.ahead_B,
            draws=self.uniforms.split(following.uniforms_BN, self._num_drafted),
        )
        result = state.commit(decision, drafted_ids_BK=flying_BA)
        state.ahead_B.copy_((decision.flags_B1[:, 0] >= GOES_ON) * self.num_ahead)
        return result


def _behind_flight(state: BatchState) -> Rows:
    """The rows as the draft sees them: what is in flight counts as text."""
    return state.rows._replace(lengths_B=state.lengths_B + state.ahead_B)
