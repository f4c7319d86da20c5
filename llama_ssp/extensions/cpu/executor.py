"""Runs the stages of a round in torch's interpreter, which replays a trace without Python.

Each number of rows and each choice of a draft has its own trace. A stage whose model may change its operators runs from
Python, as do messages of overlapped rounds.
"""

from itertools import repeat
from typing import Any

from torch import Tensor

from llama_ssp.extensions.cpu.tracing import Traced
from llama_ssp.speculate.engine.executors import filled, tensors_of
from llama_ssp.speculate.engine.round import Executor, Round, Stage
from llama_ssp.speculate.engine.state import BatchState
from llama_ssp.types import Values

_STATE = len(BatchState._fields)


class TracedExecutor(Executor):
    """Runs the stages of a round in torch's interpreter; `traced` has them by name."""

    repeats_prompts = False

    def __init__(self, round_: Round) -> None:
        super().__init__()
        self._round = round_
        self.traced: dict[str, Traced[Any]] = {}
        self._forms: dict[Any, Any] = {}

    def run(self, stage: Stage, state: BatchState, *values: Values) -> Values:
        """See `Executor`."""
        if not stage.repeats:
            return stage.function(state, *values)
        tensors = tensors_of(values)
        key = stage.operators, state.tokens_BS.shape, state.places_B.shape, *[tensor.shape for tensor in tensors]

        def flat(*inputs: Tensor) -> Values:
            found = stage.function(BatchState(*inputs[:_STATE]), *filled(values, iter(inputs[_STATE:])))
            if isinstance(found, Tensor):
                return found
            self._forms[key] = filled(found, repeat(...))
            return tensors_of(found)

        if stage.name not in self.traced:
            self.traced[stage.name] = Traced(reads=stage.reads)
        version = self._round.num_allocations
        found = self.traced[stage.name](flat, key, *state, *tensors, bucket=stage.bucket, version=version)
        return found if isinstance(found, Tensor) else filled(self._forms[key], iter(found))
