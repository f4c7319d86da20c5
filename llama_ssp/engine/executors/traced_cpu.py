"""Rounds on the CPU in two recorded pieces, so that torch runs each without Python in between (see `recorded`).

    draft    the round's numbers, all steps of the draft with their draws
    verify   the target's forward, the processors, the rule and the commit

The pieces are those of `captured`. One whose model cannot be recorded is called from Python, as is the first round of
each batch size.

Shapes are those of `rounds`.
"""

from torch import Tensor

from llama_ssp.drafting.broadcast import AgreedRule
from llama_ssp.drafting.protocol import Drafter
from llama_ssp.engine.clock import Clock
from llama_ssp.engine.round import Opening, Rounds
from llama_ssp.engine.state import BatchState
from llama_ssp.models.runner import Runner
from llama_ssp.recorded import Recorded

_STATE = len(BatchState._fields)


class ReplayedRounds(Rounds):
    """Rounds that are replayed by torch's interpreter; see `Rounds`."""

    def __init__(self, target: Runner, drafter: Drafter | None, *, rule: AgreedRule, clock: Clock) -> None:
        super().__init__(target, drafter, rule=rule, clock=clock)
        self._open = Recorded(self._open_over)
        self._close = Recorded(self._close_over)
        self._tables = self.last_and_drafted_W, *rule.made

    def open(self, state: BatchState, *, bucket: int) -> Opening:
        """See `Rounds.open`."""
        assert self.drafter
        held = self.drafter.held(bucket=bucket)
        if held is None:
            return super().open(state, bucket=bucket)
        self._bucket = bucket
        return Opening(*self._open(state.lengths_B.shape, *state, held=held))

    def close(self, state: BatchState, opening: Opening | None, *, bucket: int) -> Tensor:
        """See `Rounds.close`."""
        held = self.target.held(bucket=bucket)
        if held is None:
            return super().close(state, opening, bucket=bucket)
        self._bucket = bucket
        drafted = [part for part in opening or () if part is not None]
        return self._close(state.lengths_B.shape, *state, *drafted, held=held.beside(self._tables))

    def _open_over(self, *state: Tensor) -> tuple[Tensor, ...]:
        opening = super().open(BatchState(*state), bucket=self._bucket)
        return tuple(part for part in opening if part is not None)

    def _close_over(self, *tensors: Tensor) -> Tensor:
        state, drafted = BatchState(*tensors[:_STATE]), tensors[_STATE:]
        return super().close(state, Opening(*drafted) if drafted else None, bucket=self._bucket)
