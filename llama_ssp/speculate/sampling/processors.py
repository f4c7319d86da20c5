"""Turns logits into probabilities and draws one token per row from two uniforms.

The temperature comes first, then the filters (`settings.processors`) in their order, which keep the same tokens as the
warpers of transformers. Ties: logits equal to the smallest kept one are kept too (transformers' top-p keeps the ones
that its sort puts last).

Shapes: B sequences, V vocabulary, P = 2 uniforms per draw, C blocks of M tokens, S logits sorted in descending order;
`...` stands for any leading dimensions.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama_ssp.architectures.matrices import tokens_of_a_block
from llama_ssp.registry import operators
from llama_ssp.settings.processors import filters, numbers_of
from llama_ssp.settings.schema import SamplingConfig

# Weights become multiples of 2^-62; their sums are below 2, so they fit into int64 and are exact in any order.
DRAW_UNITS = 2.0**62


def scale_of(temperature: float) -> float:
    """The factor of logits: never 0 in fp32, which would make NaN of a logit of minus infinity."""
    return max(1 / temperature, torch.finfo(torch.float32).tiny)


def processor(sampling: SamplingConfig, *, breaks_ties: bool = False) -> Callable[[Tensor], Tensor]:
    """Compose the processors of a sampling config with a temperature above 0 (greedy has no probabilities).

    Returns a function from logits (..., V), left unchanged, to probabilities (..., V) in fp32, or fp64 for logits in
    fp64. A logit of minus infinity has probability 0. With `breaks_ties`, top-k leaves exactly k tokens, so some of the
    equal ones. A draft may do so, since verification is exact whatever it draws from.
    """
    asked = numbers_of(sampling, filters())
    reads_logits = any(one.reads_logits for one, _ in asked)
    assert sampling.temperature > 0

    def process(logits: Tensor) -> Tensor:
        vocab_size = logits.shape[-1]
        if not reads_logits and (own := own_operator("softmax", logits)):
            probs = own(logits.reshape(-1, vocab_size), scale=scale_of(sampling.temperature)).view(logits.shape)
        else:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            logits = logits.to(dtype) * scale_of(sampling.temperature)
            probs = torch.softmax(logits, dim=-1)
        if not asked:
            return probs
        found = SortedCandidates(logits, probs, breaks_ties=breaks_ties)
        for one, number in asked:
            found.probs.mul_(one.keep(found, number))
            found.probs.div_(found.probs.sum(-1, keepdim=True))
        return found.probs

    return process


class SortedCandidates:
    """The tokens that filters choose from; see `settings.processors.Candidates`.

    With `breaks_ties`, `first` leaves exactly as many tokens as a Python number says.
    """

    def __init__(self, logits: Tensor, probs: Tensor, *, breaks_ties: bool = False) -> None:
        self.logits, self.probs, self._breaks_ties = logits, probs, breaks_ties
        self._largest_S: Tensor | None = None
        self._ids_S: Tensor | None = None

    def first(self, number: float | Tensor) -> Tensor:
        """Whether a token is among the `number` most probable ones; others with an equal logit are too."""
        if isinstance(number, Tensor):
            if self._largest_S is None:
                self._largest_S, self._ids_S = self.logits.sort(descending=True)
            last = number.long().clamp(1, self._largest_S.shape[-1]) - 1
            return self.logits >= self._largest_S.gather(-1, last.expand(*self.logits.shape[:-1], 1))
        self._largest_S, self._ids_S = self.logits.topk(min(int(number), self.logits.shape[-1]))
        if self._breaks_ties:
            return torch.zeros_like(self.logits, dtype=torch.bool).scatter_(-1, self._ids_S, 1)
        return self.logits >= self._largest_S[..., -1:]

    def mass_before(self) -> Tensor:
        """The probability, fp64, of all tokens before each one, by descending logits."""
        if self._ids_S is None:
            self._largest_S, self._ids_S = self.logits.sort(descending=True)
        probs_S = self.probs.gather(-1, self._ids_S)
        self._ids_S = None  # they take most of the memory
        return probs_S.cumsum(-1, dtype=torch.float64).sub_(probs_S)


def draw(weights_BV: Tensor, uniforms_BP: Tensor, *, units: float = DRAW_UNITS) -> Tensor:
    """Draw one token per row, in proportion to the weights: first a block of tokens, then a token in the block.

    Each token uses two uniforms: one picks the block, one the token within it, both by inverting the cumulative
    distribution. Rounding differs between placements and shifts each boundary of that distribution by the summed error
    of all weights before it; a draw between the old and the new boundary changes. Sums over about a hundred blocks, and
    then over the tokens of one, shift far less than one sum over the whole vocabulary.

    A token of weight 0 is never drawn: with c the cumulative sum in integers and x = floor(u c[-1]), the first i with
    c[i] > x has c[i - 1] <= x < c[i]. Integers make this hold for parallel sums too, where fp64 would round c[i] and
    c[i - 1] differently. Indices are clamped only because of NaN, which must not become an invalid id before its flag
    is reported.

    Args:
        weights_BV: at least 0, with a sum above 0 and below 2: probabilities, or a residual of them. A row with a
            small sum has coarser shares, but is rarer in the same proportion.
        uniforms_BP: fp64 in [0, 1): for the block, and for the token in it.
        units: 1 for weights that have been multiplied by `DRAW_UNITS`.

    Returns:
        int64 (B, 1); the boundaries between tokens are exact to within V 2^-53 over the row's sum.
    """
    vocab_size = weights_BV.shape[-1]
    if weights_BV.dtype is torch.float32:
        block_size = tokens_of_a_block(vocab_size)
        if own := made("draw", weights_BV.device.type):
            uniforms_BP = uniforms_BP.contiguous() if uniforms_BP.is_cpu else uniforms_BP  # a kernel more on a GPU
            return own(weights_BV.contiguous(), uniforms_BP, units, block_size)  # type: ignore[no-any-return]
    units_BV = weights_BV if units == 1.0 else weights_BV * units
    return draw_units(units_BV, uniforms_BP, vocab_size=vocab_size)


def own_operator(operation: str, numbers: Tensor) -> Callable[..., Tensor] | None:
    """Return the device's operator that replaces a function here or in `shards`, for numbers of up to 32 bits."""
    is_short = numbers.dtype.itemsize <= torch.float32.itemsize
    return made(operation, numbers.device.type) if is_short else None


made = cache(operators.made)
"""Draws ask in every round."""


def some_draws(num_rows: int) -> tuple[Tensor, Tensor]:
    """Return weights of 1000 tokens, and uniforms, for trying out a kernel of draws."""
    generator = torch.Generator().manual_seed(0)
    weights_BV = torch.randn(num_rows, 1000, generator=generator).softmax(-1)
    return weights_BV, torch.rand(num_rows, 2, generator=generator, dtype=torch.float64)


def draw_units(units_BV: Tensor, uniforms_BP: Tensor, *, vocab_size: int) -> Tensor:
    """Do what `draw` does with operators of torch, for weights that have been multiplied by `DRAW_UNITS`."""
    block_size = tokens_of_a_block(vocab_size)
    num_blocks = -(-vocab_size // block_size)
    num_missing = num_blocks * block_size - vocab_size
    whole_BV = units_BV.long()
    if num_missing:
        whole_BV = pad(whole_BV, (0, num_missing))
    blocks_BCM = whole_BV.unflatten(1, (num_blocks, block_size))
    of_blocks_B1, of_tokens_B1 = uniforms_BP.split(1, dim=1)
    blocks_B1 = _pick(blocks_BCM.sum(-1), of_blocks_B1, num_places=num_blocks)
    rows_B = rows_at(blocks_B1, num_rows=units_BV.shape[0], num_positions=num_blocks)
    places_B1 = _pick(blocks_BCM.flatten(0, 1).index_select(0, rows_B), of_tokens_B1, num_places=block_size)
    ids_B1 = places_B1.add_(blocks_B1, alpha=block_size)
    return ids_B1.clamp_max_(vocab_size - 1) if num_missing else ids_B1


def rows_at(positions_B1: Tensor, *, num_rows: int, num_positions: int) -> Tensor:
    """The index (B,) of one position of each row when rows and positions are flattened into one dimension."""
    rows_B = positions_B1.flatten()
    if num_rows == 1:
        return rows_B
    return rows_B + torch.arange(0, num_rows * num_positions, num_positions, device=rows_B.device)


def rows_after(node_B1: Tensor, *probs_BTV: Tensor) -> list[Tensor]:
    """Take from each tensor of probabilities the row (B, V) after one node per sequence."""
    num_rows, num_positions, _ = probs_BTV[0].shape
    rows_B = rows_at(node_B1, num_rows=num_rows, num_positions=num_positions)
    return [of_all.flatten(0, 1).index_select(0, rows_B) for of_all in probs_BTV]


def token_of_blocks(blocks_B2C: Tensor, uniforms_BP: Tensor) -> Tensor:
    """Pick a block by the first uniform, from the sums and tokens of all blocks; returns the block's token (B, 1)."""
    sums_BC, ids_BC = blocks_B2C.unbind(1)
    return ids_BC.gather(1, _pick(sums_BC, uniforms_BP[:, :1], num_places=sums_BC.shape[1]))


def _pick(units_BX: Tensor, uniforms_B1: Tensor, *, num_places: int) -> Tensor:
    """The index in each row where the cumulative sum passes the given share of the total."""
    cumulative_BX = units_BX.cumsum(-1)
    points_B1 = (uniforms_B1 * cumulative_BX.narrow(1, num_places - 1, 1)).long()
    return torch.searchsorted(cumulative_BX, points_B1, right=True).clamp_max_(num_places - 1)
