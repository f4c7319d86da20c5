"""Runs rounds on the CPU as two traces, so that torch executes each piece without Python (see `tracing`).

    draft    the round's uniforms, all steps of the draft with their draws
    verify   the target's forward, the processors, the rule and the commit

Each batch size and each choice of a draft has its own traces. Their first round runs from Python, as does every piece
whose model may change its operators.
"""

from torch import Tensor

from llama_ssp.engine.executors.tracing import Traced
from llama_ssp.engine.round import Block, DraftChoice, Round
from llama_ssp.engine.state import BatchState

_STATE = len(BatchState._fields)


class TracedExecutor:
    """Runs the pieces of a round in torch's interpreter; see `Executor`."""

    keeps_state = False

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._choice: DraftChoice | None = None
        self.traced_draft = Traced(self._draft, reads=(round_.drafters,))
        self.traced_verify = Traced(self._verify, reads=(round_.target, round_.verifier, round_.last_and_drafted_W))

    def draft(self, state: BatchState, *, choice: DraftChoice, bucket: int) -> Block:
        """See `Executor.draft`."""
        drafter = self._round.drafters[choice.source]
        if drafter.on_host or not drafter.repeats_operators:
            return self._round.draft(state, choice=choice, bucket=bucket)
        self._choice, self._bucket = choice, bucket
        key, version = (state.lengths_B.shape, choice), self._round.num_allocations
        return Block(choice, *self.traced_draft(key, *state, bucket=bucket, version=version))

    def verify(self, state: BatchState, block: Block | None, *, bucket: int) -> Tensor:
        """See `Executor.verify`."""
        if not self._round.target.repeats_operators:
            return self._round.verify(state, block, bucket=bucket)
        self._choice, self._bucket = block.choice if block else None, bucket
        drafted = [part for part in block[1:] if isinstance(part, Tensor)] if block else []
        num_tokens = block.choice.num_tokens if block else 0
        key, version = (state.lengths_B.shape, num_tokens, len(drafted)), self._round.num_allocations
        return self.traced_verify(key, *state, *drafted, bucket=bucket, version=version)

    def _draft(self, *state: Tensor) -> tuple[Tensor, ...]:
        assert self._choice
        block = self._round.draft(BatchState(*state), choice=self._choice, bucket=self._bucket)
        return tuple(part for part in block[1:] if isinstance(part, Tensor))

    def _verify(self, *tensors: Tensor) -> Tensor:
        state, drafted = BatchState(*tensors[:_STATE]), tensors[_STATE:]
        block = Block(self._choice, *drafted) if self._choice else None
        return self._round.verify(state, block, bucket=self._bucket)
