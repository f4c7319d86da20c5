"""Runs rounds on the CPU as two traces, so that torch executes each piece without Python (see `tracing`).

    draft    the round's uniforms, all steps of the draft with their draws
    verify   the target's forward, the processors, the rule and the commit

The first round of each batch size runs from Python, as does every piece whose model may change its operators.
"""

from torch import Tensor

from llama_ssp.engine.executors.tracing import Traced
from llama_ssp.engine.round import Block, Round
from llama_ssp.engine.state import BatchState

_STATE = len(BatchState._fields)


class TracedExecutor:
    """Runs the pieces of a round in torch's interpreter; see `Executor`."""

    keeps_state = False

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self.traced_draft = Traced(self._draft, reads=(round_.drafter,))
        self.traced_verify = Traced(self._verify, reads=(round_.target, round_.verifier, round_.last_and_drafted_W))

    def draft(self, state: BatchState, *, bucket: int) -> Block:
        """See `Executor.draft`."""
        drafter = self._round.drafter
        assert drafter
        if drafter.on_host or not drafter.repeats_operators:
            return self._round.draft(state, bucket=bucket)
        self._bucket = bucket
        version = self._round.num_allocations
        return Block(*self.traced_draft(state.lengths_B.shape, *state, bucket=bucket, version=version))

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """See `Executor.verify`."""
        if not self._round.target.repeats_operators:
            return self._round.verify(state, block, bucket=bucket)
        self._bucket = bucket
        drafted = [part for part in block or () if part is not None]
        key, version = (state.lengths_B.shape, len(drafted)), self._round.num_allocations
        return self.traced_verify(key, *state, *drafted, bucket=bucket, version=version)

    def _draft(self, *state: Tensor) -> tuple[Tensor, ...]:
        block = self._round.draft(BatchState(*state), bucket=self._bucket)
        return tuple(part for part in block if part is not None)

    def _verify(self, *tensors: Tensor) -> Tensor:
        state, drafted = BatchState(*tensors[:_STATE]), tensors[_STATE:]
        return self._round.verify(state, Block(*drafted) if drafted else None, bucket=self._bucket)
