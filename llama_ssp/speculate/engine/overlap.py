"""Rounds in which drafting overlaps verification: while the target verifies a block, the draft goes on from it.

The draft holds ranks of its own. In every round it drafts K tokens after the K - 1 in flight, which the target scores
at the same time. All of them and the first new token are then verified:

    K = 4               L-1   L    L+1   L+2   L+3   L+4   L+5   L+6
    the target reads     t    d1    d2    d3
    the draft writes                             e0    e1    e2    e3
    all accepted              d1    d2    d3     e0 |  e1    e2    e3  in flight in the next round, no bonus token
    d2 is rejected            d1    x |                                all others dropped, the next round has x alone

So every row gains at least one token in a round (docs/design/overlap.md). A round is a fixed sequence of four stages,
and only the last two need other ranks' results:

    draft      on the draft's ranks
    score      of the last token and the tokens in flight, on the target's ranks, at the same time
    exchange   ids to all ranks, probabilities to the rank that verifies
    decide     the rule, its decision to all ranks, commit

Ids in flight stand in the batch after the text. All rows of a block's probabilities but the first belong to the ids in
flight in the next round. An executor that keeps its state writes results to the same addresses in every round: there
the last stage copies these probabilities to a second place, since the next round receives its own block first.

Source: Liu et al. 2024, arXiv:2408.11850, whose pre-verify and post-verify happen here in one kind of round.

Shapes: B sequences, K drafted tokens, T = K + 1, V vocabulary, N uniforms of a round; L is a row's length.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from llama_ssp.models.runner import Runner
from llama_ssp.ranks.comms import Comm
from llama_ssp.speculate.drafters.limited import LimitedDrafter
from llama_ssp.speculate.drafters.shared import AheadDrafter
from llama_ssp.speculate.engine.clock import HostClock
from llama_ssp.speculate.engine.masks import Constraint
from llama_ssp.speculate.engine.round import DraftChoice, Executor, Round
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.speculate.engine.verifier import GOES_ON, Verifier
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.draft import POINT_MASS, Draft, Law, PointMass, Verdict
from llama_ssp.speculate.sampling.row_steps import RowSteps
from llama_ssp.speculate.sampling.rules import verify_ahead


def make_round(
    target: Runner,
    drafter: AheadDrafter | LimitedDrafter,
    *,
    verifier: Verifier,
    holders: tuple[Comm | None, Comm | None],
    **_refused: object,
) -> "OverlappedRound":
    """Make the round of a run that overlaps; `settings.combinations` refuses taps, trees and constraints with it."""
    return OverlappedRound(target, drafter, verifier=verifier, holders=holders)


class OverlappedRound(Round):
    """A round whose drafter works while the target verifies; without drafted tokens it is an ordinary `Round`."""

    has_bonus = False

    def __init__(
        self,
        target: Runner,
        drafter: AheadDrafter | LimitedDrafter,
        *,
        verifier: Verifier,
        holders: tuple[Comm | None, Comm | None] = (None, None),
    ) -> None:
        super().__init__(target, drafter, verifier=verifier, holders=holders)
        self._drafter = drafter
        self.num_ahead = drafter.num_draft_tokens - 1
        self._in_flight_A = torch.arange(self.num_ahead, device=target.device)
        self._kept_BTV: Tensor | None = None

    def step(
        self,
        executor: Executor,
        state: BatchState,
        in_flight: Law = POINT_MASS,
        *,
        choice: DraftChoice,
        bucket: int,
        clock: HostClock,
        constraints: Sequence[Constraint | None] = (),
    ) -> tuple[Tensor, Law]:
        """Run one overlapped round; see `Round.step`.

        A rank only waits for the other model in the exchange, and on the draft's ranks in the last stage.
        """
        if not choice.num_tokens:
            return super().step(executor, state, choice=choice, bucket=bucket, clock=clock)

        assert not constraints, "refused by `settings.combinations`"
        number, keeps, reads = choice.num_tokens, executor.replays_addresses, (self.verifier, self._in_flight_A)
        drafting = self._draft_stage(choice, False, False, self.steps, bucket=bucket)
        scoring = self._of_target("score", self._score_in_flight, number, self.steps, bucket=bucket)
        exchanging = self._stage("exchange", self._exchange, self.steps, reads=reads, repeats=False, behind=(drafting,))
        deciding = self._stage(
            "decide",
            self._verify_ahead,
            number,
            keeps,
            reads=reads,
            repeats=True,
            behind=(scoring, exchanging),
        )
        clock.start()
        ran_s = time.thread_time()
        drafted = executor.run(drafting, state)
        clock.add("draft")
        if self._drafter.drafts_here:
            clock.add_cpu(time.thread_time() - ran_s)
        target_BKV = executor.run(scoring, state)
        clock.add("verify")
        following = executor.run(exchanging, state, drafted)
        clock.add("draft", waits=True)
        before = self._before(executor, in_flight, following.law)
        result = executor.run(deciding, state, target_BKV, following, before)
        clock.add("verify", waits=self._drafter.drafts_here)
        return result, before if keeps else following.law

    def _before(self, executor: Executor, in_flight: Law, following: Law) -> Law:
        """Return the probabilities of the tokens in flight.

        Before the first round no row has tokens in flight, so the values do not matter: they are any tensor of the
        right shape, at a fixed address if the executor needs one.
        """
        if isinstance(following, PointMass) or isinstance(in_flight, Tensor):
            return in_flight
        if not executor.replays_addresses:
            return following
        batch_size, _, vocab_size = following.shape
        shape = batch_size, self.num_ahead + 2, vocab_size
        if self._kept_BTV is None or self._kept_BTV.shape != shape:
            self._kept_BTV = following.new_zeros(shape)
        return self._kept_BTV

    def draft_rows(self, state: BatchState) -> Rows:
        """The rows as the draft sees them: tokens in flight count as text."""
        return state.rows._replace(lengths_B=state.lengths_B + state.ahead_B)

    def _score_in_flight(self, num_tokens: int, steps: RowSteps | None, bucket: int, state: BatchState) -> Tensor:
        logits_BKV = self.score(state, num_drafted=num_tokens - 1, bucket=bucket)
        return self.verifier.process(logits_BKV, self._context(state, steps, num_drafted=num_tokens - 1))

    def _exchange(self, steps: RowSteps | None, state: BatchState, draft: Draft) -> Draft:
        return self._counted(self._drafter.exchange(draft, self.draft_rows(state)), state, steps)

    def _verify_ahead(  # noqa: PLR0917 - a stage's
        self,
        num_tokens: int,
        keeps: bool,
        state: BatchState,
        target_BKV: Tensor,
        following: Draft,
        before: Law,
    ) -> Tensor:
        """Verify and commit the tokens in flight, and decide which rows keep the block that follows.

        `before` has the probabilities of the tokens in flight. Returns the result (B, K + 2): these tokens, then the
        decision.
        """
        flying_BA = state.tokens_BS.gather(1, state.lengths_B[:, None] + self._in_flight_A)
        in_flight = Draft(flying_BA, before if isinstance(before, PointMass) else before[:, 1:])
        first = following.first()
        draws, rule = self._draws(state, following), self.verifier.rule
        most_B1 = following.num_B1
        if isinstance(most_B1, Tensor):
            # The first token of the block that follows is no accepted one, and has no law after it.
            most_B1 = most_B1.masked_fill(most_B1 > state.ahead_B[:, None], num_tokens + 1)

        def verdict(_own: slice | None) -> tuple[Verdict, None]:
            found = verify_ahead(rule, in_flight, first, target_BKV, ahead_B=state.ahead_B, draws=draws)
            if isinstance(most_B1, Tensor):
                found = rule.at_most(found, most_B1, target_BKV, draws=draws)
            return found, None

        decision = self.verifier.decide(verdict, batch_size=flying_BA.shape[0])
        goes_on_B1 = decision.node_B1 > state.ahead_B[:, None]  # the next token is the first of the block that follows
        node_B1, flags_B1 = decision.node_B1 - goes_on_B1.long(), decision.flags_B1.add(goes_on_B1, alpha=GOES_ON)
        result = state.commit(decision._replace(node_B1=node_B1, flags_B1=flags_B1), flying_BA)
        state.ahead_B.copy_(goes_on_B1[:, 0] * self.num_ahead)
        if keeps and isinstance(before, Tensor):
            before.copy_(following.drawn_law)
        return result
