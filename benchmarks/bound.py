"""What a round cannot do without: its forwards timed alone, and its weights read once from memory.

Two bounds. The first is what the forwards of a round cost when nothing else happens, in the caches as a round leaves
them or out of caches that other bytes have filled. The second knows no operators: the target's matrices once and the
draft's K times, at the fastest pass over memory that was seen with as many threads. Weights that a cache holds may beat
it, cold ones cannot.
"""

import statistics
import time
from collections.abc import Callable

import torch

from llama_ssp.decoding.loop import Decoder
from llama_ssp.tasks.measuring import copy_bytes_per_s, seconds_per_call

CPU = torch.device("cpu")
PASS_BYTES = 2**28
"""Of a buffer that is read or copied: more than the caches of most processors hold."""


def forwards_alone_s(
    decoder: Decoder, *, context: int, num_turns: int = 60, between: Callable[[], object] | None = None
) -> tuple[float, float]:
    """Seconds of one verification with its processors, and of one draft step with its draw, behind `context` tokens.

    They take turns as in a round, so that each finds the processor's caches as a round leaves them, and nothing else of
    a round happens in between.

    Args:
        decoder: a speculative one, of one row.
        context: tokens before the round.
        num_turns: how often; the medians count.
        between: called before each of the two, outside the times, such as `Passes.fill_caches`.
    """
    models = decoder.rounds
    drafter = models.drafter
    assert drafter
    num_draft_tokens = drafter.num_draft_tokens
    num_slots = -(-(context + num_draft_tokens + 1) // 64) * 64
    models.target.allocate(batch_size=1, capacity=num_slots)
    drafter.allocate(batch_size=1, num_slots=num_slots)
    tokens_1S = torch.ones(1, num_slots, dtype=torch.int64)
    lengths_1 = torch.tensor([context])
    uniforms_1K = torch.full((1, num_draft_tokens), 0.5, dtype=torch.float64)
    positions_1W = torch.arange(context - 1, context + num_draft_tokens)[None]

    def draft() -> object:
        return drafter.propose(tokens_1S, lengths_1, uniforms_BK=uniforms_1K, bucket=num_slots)

    def verify() -> object:
        logits_BTV = models.target.forward(tokens_1S[:, : num_draft_tokens + 1], positions_1W, bucket=num_slots)
        return models.rule.process(logits_BTV)

    seconds: dict[Callable[[], object], list[float]] = {draft: [], verify: []}
    with torch.inference_mode():
        for _ in range(num_turns):
            for part, times in seconds.items():
                if between:
                    between()
                began = time.perf_counter()
                part()
                times.append(time.perf_counter() - began)
    return statistics.median(seconds[verify]), statistics.median(seconds[draft]) / num_draft_tokens


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
