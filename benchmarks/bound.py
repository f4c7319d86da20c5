"""What a round cannot do without: its forwards timed alone, and its weights read once from memory.

Two bounds. The first is what the forwards of a round cost when nothing else happens, in the caches as a round leaves
them or out of caches that other bytes have filled. The second knows no operators: the target's matrices once and the
draft's K times, at the fastest pass over memory that was seen with as many threads. Weights that a cache holds may beat
it, cold ones cannot.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llama_ssp.calibration.operators import copy_bytes_per_s, seconds_per_call
from llama_ssp.engine.executors.tracing import Traced
from llama_ssp.engine.loop import Decoder
from llama_ssp.engine.state import BatchState

CPU = torch.device("cpu")
PASS_BYTES = 2**28
"""Of a buffer that is read or copied: more than the caches of most processors hold."""
_TURNS_TO_RECORD = 2


def forwards_alone_s(
    decoder: Decoder, *, contexts: Sequence[int], between: Callable[[], object] | None = None
) -> tuple[float, float]:
    """Seconds of one verification with its processors, and of one draft step with its draw.

    They take turns as in a round, so that each finds the processor's caches as a round leaves them, and nothing else of
    a round happens in between. Both are recorded where those of a round are.

    Args:
        decoder: a speculative one, of one row.
        contexts: tokens before each turn. The means over all turns count, since rounds are compared by their means.
        between: called before each of the two, outside the times, such as `Passes.fill_caches`.
    """
    round_ = decoder.round
    [choice] = decoder.length.choices
    num_draft_tokens = choice.num_tokens
    buckets = [-(-(context + num_draft_tokens + 1) // 64) * 64 for context in contexts]
    round_.allocate(batch_size=1, num_slots=max(buckets))
    state = BatchState.empty(1, num_slots=max(buckets), num_rounds=1, table=round_.uniforms)
    state.tokens_BS.fill_(1)
    state.uniforms_BMN.fill_(0.5)
    reads = (round_.target, round_.verifier, round_.last_and_drafted_W)

    def scored(*tensors: Tensor) -> Tensor:
        scores = round_.score(BatchState(*tensors), num_drafted=num_draft_tokens, bucket=bucket)
        return round_.verifier.process(*scores)

    score = Traced(scored, reads=reads)

    def draft() -> object:
        return decoder.executor.draft(state, choice=choice, bucket=bucket)

    def verify() -> object:
        if not round_.target.repeats_operators:
            return scored(*state)
        return score(0, *state, bucket=bucket, version=round_.num_allocations)

    seconds: dict[Callable[[], object], list[float]] = {draft: [], verify: []}
    with torch.inference_mode():
        for turn in range(-_TURNS_TO_RECORD, len(contexts)):
            context, bucket = contexts[max(turn, 0)], buckets[max(turn, 0)]
            state.lengths_B.fill_(context)
            state.first_round_B.fill_(-context)
            for part, times in seconds.items():
                if between:
                    between()
                began = time.perf_counter()
                part()
                if turn >= 0:
                    times.append(time.perf_counter() - began)
    return statistics.fmean(seconds[verify]), statistics.fmean(seconds[draft]) / num_draft_tokens


class Passes:
    """Passes over more memory than caches hold."""

    def __init__(self, num_bytes: int = PASS_BYTES) -> None:
        self._num_bytes = num_bytes
        self._values = torch.ones(num_bytes // 4)

    def fill_caches(self) -> object:
        """Read the buffer, so that the caches hold it and nothing else."""
        return self._values.sum()

    def bytes_per_s(self) -> float:
        """The faster of reading it and copying it, with as many threads as torch has now."""
        return max(self._num_bytes / seconds_per_call(self.fill_caches), copy_bytes_per_s(CPU, self._num_bytes))
