"""Reads whole prompts into a model's cache, and chooses how much of the cache a forward reads.

Long prompts are read in chunks, to bound memory and the size of the mask. Nothing is sampled here.

Shapes: R rows being prefilled, S slots, T positions of a chunk, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.architectures.sizes import PREFILL_CHUNK
from llama_ssp.models.runner import Runner


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Buckets, the numbers of cache slots that a forward may read.

    There are few enough to capture one graph each, and enough to read little more than the filled slots.

    Attributes:
        step: every bucket is a multiple of it, except the last one.
    """

    step: int
    num_slots: int

    def covering(self, num_slots: int) -> int:
        """The smallest bucket with at least `num_slots` slots."""
        return min(-(-num_slots // self.step) * self.step, self.num_slots)


def read_prompts(
    runner: Runner, tokens_RS: Tensor, lengths_R: Tensor, *, rows_R: Tensor, longest: int, buckets: Buckets
) -> Tensor:
    """Fill the cache with each row's prompt.

    Args:
        runner: the model.
        tokens_RS: token ids; row r holds a prompt in its first lengths_R[r] slots.
        lengths_R: lengths of the prompts, on the device.
        rows_R: which rows of the cache they become.
        longest: the largest of `lengths_R`, known to the host.
        buckets: of the cache.

    Returns:
        The logits (R, V) after each row's last prompt token.
    """
    last_R1 = lengths_R[:, None] - 1
    logits_RV: Tensor | None = None
    for start in range(0, longest, PREFILL_CHUNK):
        stop = min(start + PREFILL_CHUNK, longest)
        tokens_RT, bucket = tokens_RS[:, start:stop], buckets.covering(stop)
        positions_RT = torch.arange(start, stop, device=tokens_RS.device).expand(tokens_RS.shape[0], -1)
        score_R1 = (last_R1 - start).clamp(0, stop - start - 1)
        chunk_R1V = runner.forward(
            tokens_RT, positions_RT, bucket=bucket, score_positions_BR=score_R1, cache_rows_B=rows_R
        )
        ends_here_R1 = (last_R1 >= start) & (last_R1 < stop)
        logits_RV = chunk_R1V[:, 0] if logits_RV is None else torch.where(ends_here_R1, chunk_R1V[:, 0], logits_RV)
    assert logits_RV is not None, "a prompt has at least one token"
    return logits_RV
