"""Traces prefills of short prompts on the CPU, where Python takes as long as the forwards (see `tracing`).

One trace serves prompts of all lengths whose operators are the same. Tracing reads the prompts once more, so it waits
until there have been a few such prefills, and is left out where a prefill takes so long that Python hardly matters. It
is for the library alone: a run would count the tracing in the time of one of its completions.

Shapes: R rows being prefilled, T tokens of the longest prompt, S slots.
"""

import time
from collections.abc import Hashable, Sequence

from torch import Tensor

from llama_ssp.drafting.model import ModelDrafter
from llama_ssp.drafting.ngram import NgramDrafter
from llama_ssp.drafting.protocol import Drafter
from llama_ssp.engine.executors.tracing import Traced
from llama_ssp.engine.round import Round
from llama_ssp.engine.state import BatchState
from llama_ssp.models.prefill import Buckets, Prompts
from llama_ssp.models.runner import Runner, row_class
from llama_ssp.models.upload import to_device

_MOST_TOKENS = 64
_NUM_TIMED, _LONGEST_S = 2, 0.1


class TracedPrefill:
    """Runs the prefills of a round, from Python or in torch's interpreter; see `Round.prefill`.

    Attributes:
        traced: the prefills of short prompts.
    """

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._allocations: tuple[int, ...] = ()
        self._timed: dict[Hashable, list[float]] = {}
        self.traced = Traced(self._read, reads=(round_.target, round_.drafters, round_.verifier))

    def __call__(
        self,
        prompts: BatchState,
        rows: Sequence[int],
        *,
        lengths: Sequence[int],
        buckets: Buckets,
        drafters: Sequence[Drafter] | None = None,
    ) -> Tensor:
        """See `Round.prefill`."""
        round_, longest = self._round, max(lengths)
        self._drafters = round_.drafters if drafters is None else drafters
        key = (
            len(rows), row_class(len(rows) * longest), prompts.num_slots,
            tuple(drafter in self._drafters for drafter in round_.drafters),
        )  # fmt: skip
        seconds, allocations = self._timed.setdefault(key, []), round_.num_allocations
        # The first forward after an allocation makes the caches, which a trace must find.
        is_first, self._allocations = allocations != self._allocations, allocations
        if is_first or len(seconds) < _NUM_TIMED or min(seconds) > _LONGEST_S or not self._is_short(rows, longest):
            started = time.perf_counter()
            result = round_.prefill(prompts, rows, lengths=lengths, buckets=buckets, drafters=drafters)
            seconds[_NUM_TIMED - 1 :] = [time.perf_counter() - started]
            return result
        self._rows, self._lengths, self._buckets = rows, lengths, buckets
        tokens_RT, rows_R = prompts.tokens_BS[:, :longest], to_device(rows, round_.target.device)
        return self.traced(
            key, tokens_RT, rows_R, *prompts, bucket=buckets.covering(longest), version=round_.num_allocations
        )

    def _is_short(self, rows: Sequence[int], longest: int) -> bool:
        """Whether a prefill is short enough, and calls the same operators whenever its key is the same."""
        if len(rows) * longest > _MOST_TOKENS or self._round.verifier.comm.size > 1:
            return False
        is_known = all(isinstance(drafter, ModelDrafter | NgramDrafter) for drafter in self._drafters)
        models = [drafter.runner for drafter in self._drafters if isinstance(drafter, ModelDrafter)]
        return is_known and all(map(_repeats, [self._round.target, *models]))

    def _read(self, tokens_RT: Tensor, rows_R: Tensor, *state: Tensor) -> Tensor:
        prompts, lengths = BatchState(*state), self._lengths
        to_read = Prompts(tokens_RT, prompts.lengths_B, lengths, longest=max(lengths), rows_R=rows_R)
        return self._round.read(prompts, to_read, self._rows, buckets=self._buckets, drafters=self._drafters)


def _repeats(runner: Runner) -> bool:
    return runner.repeats_operators and runner.repeats_at_any_length and not runner.packs_prompts
