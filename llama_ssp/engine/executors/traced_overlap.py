"""Runs overlapped rounds on the CPU as traces (see `tracing`), but for the exchange between their ranks.

draft          the round's uniforms, all steps of the draft with their draws
score_flight   the target's forward and the processors
settle         the rule and the commit
"""

from torch import Tensor

from llama_ssp.engine.executors.tracing import Traced
from llama_ssp.engine.overlap import OverlappedExecutor, OverlappedRound
from llama_ssp.engine.round import Block, DraftChoice
from llama_ssp.engine.state import BatchState

_STATE = len(BatchState._fields)


class TracedOverlap(OverlappedExecutor):
    """Runs the pieces of an overlapped round in torch's interpreter; see `OverlappedExecutor`."""

    def __init__(self, round_: OverlappedRound) -> None:
        self._round = round_
        self._traced_draft = Traced(self._draft, reads=(round_.drafters,))
        self._traced_score = Traced(self._score, reads=(round_.target, round_.verifier, round_.last_and_drafted_W))
        self._traced_settle = Traced(self._settle, reads=(round_.verifier, round_.in_flight_A))

    @property
    def drafts_here(self) -> bool:
        """See `OverlappedExecutor`."""
        return self._round.drafts_here

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """See `OverlappedExecutor`."""
        drafter = self._round.drafters[choice.source]
        if drafter.on_host or not drafter.repeats_operators:
            return self._round.draft(state, choice=choice, bucket=bucket)
        self._choice, self._bucket = choice, bucket
        key, version = (state.lengths_B.shape, choice), self._round.num_allocations
        return Block(choice, *self._traced_draft(key, *state, bucket=bucket, version=version))

    def score_flight(self, state: BatchState, *, num_drafted: int, bucket: int) -> Tensor:
        """See `OverlappedExecutor`."""
        if not self._round.target.repeats_operators:
            return self._round.score_flight(state, num_drafted=num_drafted, bucket=bucket)
        self._num_drafted, self._bucket = num_drafted, bucket
        key, version = (state.lengths_B.shape, num_drafted), self._round.num_allocations
        return self._traced_score(key, *state, bucket=bucket, version=version)

    def exchange(self, state: BatchState, block: Block) -> Block:
        """See `OverlappedExecutor`."""
        return self._round.exchange(state, block)

    def refill(self, state: BatchState, before: Block | None, fresh: Block) -> Block:
        """See `OverlappedExecutor`."""
        return self._round.refill(state, before, fresh)

    def settle(
        self, state: BatchState, before: Block | None, following: Block, target_BKV: Tensor
    ) -> tuple[Tensor, Block]:
        """See `OverlappedExecutor`."""
        self._choice = following.choice
        probs = [each.probs_BWV for each in (before or following, following) if each.probs_BWV is not None]
        key = state.lengths_B.shape, following.choice.num_tokens, len(probs)
        tensors = *state, target_BKV, following.uniforms_BN, following.ids_BK, *probs
        return self._traced_settle(key, *tensors), following

    def _draft(self, *state: Tensor) -> tuple[Tensor, ...]:
        block = self._round.draft(BatchState(*state), choice=self._choice, bucket=self._bucket)
        return tuple(part for part in block[1:] if isinstance(part, Tensor))

    def _score(self, *state: Tensor) -> Tensor:
        return self._round.score_flight(BatchState(*state), num_drafted=self._num_drafted, bucket=self._bucket)

    def _settle(self, *tensors: Tensor) -> Tensor:
        state, (target_BKV, uniforms_BN, ids_BK, *probs) = BatchState(*tensors[:_STATE]), tensors[_STATE:]
        before, after = probs or (None, None)
        following = Block(self._choice, uniforms_BN, ids_BK, after)
        return self._round.decide(state, following._replace(probs_BWV=before), following, target_BKV)
