"""A vocabulary over the ranks that share a model: each has the numbers of its own tokens, and ranks exchange sums.

    softmax   of each part the largest logit, and the sum of exponentials below it
    at        the numbers of given tokens, each of which one rank has
    draw      of each block its sum, and the token that is drawn if the block is
    total     sums
    best      the largest number of each part, and its token

Parts begin where blocks of a draw do, and sums of weights are whole numbers. So from the same weights any number of
ranks draws the token that one rank draws; probabilities equal one rank's within rounding.

All ranks of the group must call each method together, and get the same results.

Shapes: B sequences, K drafted tokens, V tokens of this rank, P = 2 uniforms per draw, R ranks, C blocks of M tokens;
`...` stands for any leading dimensions.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.matrices import tokens_of_a_block, vocabulary_parts
from llama_ssp.ranks.comms import Comm, best_of
from llama_ssp.speculate.sampling.processors import DRAW_UNITS, draw, own_operator, token_of_blocks


class Shard:
    """This rank's part of a vocabulary of `vocab_size` tokens; by default a whole vocabulary of any size.

    Attributes:
        is_whole: whether this rank has all tokens, and exchanges nothing.
    """

    def __init__(self, comm: Comm | None = None, vocab_size: int = 0) -> None:
        self._comm, self._vocab_size = comm or Comm.single(), vocab_size
        self.is_whole = self._comm.size == 1
        if not self.is_whole:
            self._parts, self._block = vocabulary_parts(vocab_size, self._comm.size), tokens_of_a_block(vocab_size)
            self._own = self._parts[self._comm.rank]

    def ids(self, num_tokens: int) -> range:
        """The ids of the `num_tokens` tokens of this rank."""
        return range(num_tokens) if self.is_whole else self._own

    def own(self, numbers: Tensor) -> Tensor:
        """Return this rank's part of numbers (..., V), or the numbers themselves if they cover only its tokens."""
        is_own = self.is_whole or numbers.shape[-1] == len(self._own)
        return numbers if is_own else numbers[..., self._own.start : self._own.stop]

    def num_of_all(self, num_tokens: int) -> int:
        """Return the number of tokens on all ranks together, if this rank has `num_tokens` of them."""
        return num_tokens if self.is_whole else self._vocab_size

    def softmax(self, logits: Tensor, *, scale: float) -> Tensor:
        """The probabilities (..., V) of logits times `scale`; fp32, or fp64 of logits in fp64."""
        if own := own_operator("softmax", logits):
            rows = logits.reshape(-1, logits.shape[-1])
            return own(rows, scale=scale, join=self._joined).view(logits.shape)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        peak = logits.amax(-1, keepdim=True)
        below = logits - peak.masked_fill(peak == float("-inf"), 0.0)
        both = torch.stack([peak, below.exp_().sum(-1, keepdim=True)], dim=-2)
        peaks, totals = self._joined(both, tokens=self._vocab_size).unbind(-2)
        peak = peaks.amax(-1, keepdim=True)
        return (logits - peak).exp_().div_((totals * (peaks - peak).exp()).sum(-1, keepdim=True))

    def _joined(self, own: Tensor, *, tokens: int) -> Tensor:
        """Join columns of all ranks; each rank has one for every `tokens` tokens, rounded up."""
        return self._comm.all_gather_last(own, tuple([-(-len(part) // tokens) for part in self._parts]))

    def at(self, ids_BK: Tensor, *numbers: Tensor) -> list[Tensor]:
        """Take the values of tokens from each tensor (B, K or more, V) of `numbers`, as (B, K, 1)."""
        if self.is_whole:
            return [of_all.gather(-1, ids_BK[..., None]) for of_all in numbers]
        places_BK1 = ids_BK[..., None] - self._own.start
        own_BK1 = places_BK1.clamp(0, len(self._own) - 1)
        found = torch.stack([of_own.gather(-1, own_BK1) for of_own in numbers])
        return [*self._comm.all_reduce(found.masked_fill_(own_BK1 != places_BK1, 0.0)).unbind()]

    def total(self, weights: Tensor) -> Tensor:
        """The sums (...) of weights as `processors.draw` takes them, in whole numbers; without meaning for NaN."""
        return self._comm.all_reduce((weights * DRAW_UNITS).long().sum(-1)).to(weights.dtype).mul_(1 / DRAW_UNITS)

    def best(self, scores: Tensor) -> Tensor:
        """The largest score of each position and its token; see `best_of`."""
        return best_of(scores, first=self._own.start, comm=self._comm)

    def draw(self, weights_BV: Tensor, uniforms_BP: Tensor, *, units: float = DRAW_UNITS) -> Tensor:
        """Draw one token per row; see `processors.draw`."""
        if self.is_whole:
            return draw(weights_BV, uniforms_BP, units=units)
        own_B2C = draw_in_blocks(weights_BV, uniforms_BP, units=units, block_size=self._block)
        own_B2C[:, 1] += self._own.start
        return token_of_blocks(self._joined(own_B2C, tokens=self._block), uniforms_BP)


WHOLE = Shard()


def draw_in_blocks(weights_BV: Tensor, uniforms_BP: Tensor, *, units: float, block_size: int) -> Tensor:
    """The sum of each block of weights, and the token that the second uniform draws in it: int64 (B, 2, C)."""
    if own := own_operator("draw_in_blocks", weights_BV):
        return own(weights_BV, uniforms_BP, units, block_size)
    vocab_size = weights_BV.shape[-1]
    whole_BV = (weights_BV if units == 1.0 else weights_BV * units).long()
    blocks_BCM = pad(whole_BV, (0, -vocab_size % block_size)).unflatten(1, (-1, block_size))
    cumulative_BCM = blocks_BCM.cumsum(-1)
    sums_BC = cumulative_BCM[..., -1]
    points_BC1 = (uniforms_BP[:, 1:] * sums_BC).long()[..., None]
    ids_BC = (cumulative_BCM <= points_BC1).sum(-1).clamp_max_(block_size - 1)
    ids_BC += torch.arange(0, vocab_size, block_size, device=ids_BC.device)
    return torch.stack([sums_BC, ids_BC.clamp_max_(vocab_size - 1)], dim=1)
