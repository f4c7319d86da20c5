"""Sampling settings that differ from row to row of one batch, as requests of a server have them.

The settings of a row are numbers in the batch's tensors: a round does the same operators whatever they are. Greedy rows
are a law too: probability 1 at the best token, which every rule then drafts, accepts and draws.

    settings of a row   | 1 / temperature | filters | penalties | least | M ids | M biases | E ends |     0 where off

What a row's settings leave out changes no bit of its probabilities, so its text is as in a batch of its own. Sorting
a vocabulary and counting tokens cost time: rounds do so only while a row needs it, and only for as many rows
(`RowSteps`). Which rows these are, the device finds out from their settings, so that a graph serves any of them. Each
graph takes memory, and 0.1 s of all rows to capture, so that rounds that are graphs have few sets of steps:

    steps    none | greedy rows, limits | these, and filters | these, and penalties, biases, bans
    rows             all                  2, 16, ..., all      2, 16, ..., all

Shapes: B sequences, R some of them, T scored positions, V vocabulary, X settings of a row, M biases.
"""

import torch
from torch import Tensor

from llama_ssp.settings.processors import filters, numbers_of, penalties
from llama_ssp.settings.schema import MOST_BIASES, SamplingConfig
from llama_ssp.speculate.sampling.context import Context, TokenCounts
from llama_ssp.speculate.sampling.processors import SortedCandidates, own_operator, scale_of

_LARGEST = 2**31
"""Numbers above it, as of top-k, are this."""
_FILTERS = slice(1, 1 + len(filters()))
_PENALTIES = slice(_FILTERS.stop, _FILTERS.stop + len(penalties()))
_LEAST, _BIASES = _PENALTIES.stop, _PENALTIES.stop + 1
"""Where the settings of a row are."""
MOST_ENDS = 16
"""E: tokens that end the text of a row, and are banned from its first ones."""
NUM_SETTINGS = _BIASES + 2 * MOST_BIASES + MOST_ENDS
"""X."""


def settings_of(sampling: SamplingConfig | None) -> list[float]:
    """The X settings of a row; none in batches whose rows have the settings of the run."""
    if sampling is None:
        return []
    missing = [0.0] * (MOST_BIASES - len(sampling.logit_bias))
    numbers = {one.name: number for one, number in numbers_of(sampling, (*filters(), *penalties()))}
    return [
        scale_of(sampling.temperature) if sampling.temperature else 0.0,
        *[min(numbers.get(one.name, 0.0), _LARGEST) for one in (*filters(), *penalties())],
        sampling.min_new_tokens or 0,
        *sampling.logit_bias,
        *missing,
        *sampling.logit_bias.values(),
        *missing,
        *sampling.eos_ids,
        *[-1.0] * (MOST_ENDS - len(sampling.eos_ids)),
    ]


class ByRow:
    """Maps logits (B, T, V) and their context to the probabilities that each row's settings ask for.

    Each row equals the result of `context.penalty` and `processors.processor`; fp32, or fp64 of logits in fp64.
    """

    def __call__(self, logits_BTV: Tensor, context: Context) -> Tensor:
        """See the class; also NaN in a row with NaN."""
        steps = context.steps
        assert steps, "of a batch whose rows have settings of their own"
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        if steps.penalizes:
            rows_R = _rows(_is_penalized(context.sampling_BX), steps.most)
            some = context if rows_R is None else context.some(rows_R)
            logits_BTV = _put(logits_BTV, rows_R, _penalized(_some(logits_BTV, rows_R), some))
        scale_B11 = context.sampling_BX[:, 0, None, None].to(logits_BTV.dtype)
        if steps.has_greedy:
            is_greedy_B11 = scale_B11 == 0
            scale_B11 = scale_B11.masked_fill(is_greedy_B11, 1.0)
        scaled_BTV = logits_BTV * scale_B11
        own = own_operator("softmax", scaled_BTV)
        probs_BTV = own(scaled_BTV.flatten(0, 1), scale=1.0).view_as(scaled_BTV) if own else scaled_BTV.softmax(-1)
        if steps.filters:
            numbers_BF = context.sampling_BX[:, _FILTERS]
            rows_R = _rows((numbers_BF != 0).any(1), steps.most)
            found = SortedCandidates(_some(scaled_BTV, rows_R), _some(probs_BTV, rows_R))
            _filter(found, _some(numbers_BF, rows_R), steps.filters)
            probs_BTV = _put(probs_BTV, rows_R, found.probs)
        if not steps.has_greedy:
            return probs_BTV
        best_BTV = probs_BTV * 0.0  # NaN stays
        best_BTV.scatter_add_(-1, logits_BTV.argmax(-1, keepdim=True), torch.ones_like(best_BTV[..., :1]))
        return torch.where(is_greedy_B11, best_BTV, probs_BTV)


def _rows(needs_B: Tensor, most: int) -> Tensor | None:
    """Return `most` rows, first those that need a step; the step changes nothing in the others. None for all rows."""
    return needs_B.to(torch.uint8).sort(descending=True, stable=True).indices[:most] if most < len(needs_B) else None


def _some(part: Tensor, rows_R: Tensor | None) -> Tensor:
    return part if rows_R is None else part.index_select(0, rows_R)


def _put(whole_BTV: Tensor, rows_R: Tensor | None, some_RTV: Tensor) -> Tensor:
    return some_RTV if rows_R is None else whole_BTV.index_copy(0, rows_R, some_RTV)


def _is_penalized(sampling_BX: Tensor) -> Tensor:
    """Rows with a penalty, a ban or a bias; vacant rows have zeros there."""
    has_number_B = (sampling_BX[:, _PENALTIES.start : _BIASES] != 0).any(1)
    has_bias_B = (sampling_BX[:, _BIASES + MOST_BIASES : -MOST_ENDS] != 0).any(1)
    found_B: Tensor = has_bias_B | has_number_B
    return found_B


def _penalized(logits_BTV: Tensor, context: Context) -> Tensor:
    vocab_size, dtype = logits_BTV.shape[-1], logits_BTV.dtype
    ids_BM, biases_BM = context.sampling_BX[:, _BIASES:-MOST_ENDS].split(MOST_BIASES, dim=1)
    is_known_BM = ids_BM < vocab_size  # a draft may know fewer
    ids_B1M, biases_B1M = ((part_BM * is_known_BM)[:, None] for part_BM in (ids_BM, biases_BM))
    shape = *logits_BTV.shape[:2], MOST_BIASES
    logits_BTV = logits_BTV.scatter_add(-1, ids_B1M.long().expand(shape), biases_B1M.to(dtype).expand(shape))
    counts = TokenCounts(context, range(vocab_size), vocab_size=vocab_size)
    for one, number_B in zip(penalties(), context.sampling_BX[:, _PENALTIES].unbind(1), strict=True):
        neutral_B = number_B.masked_fill(number_B == 0, one.off) if one.off else number_B
        logits_BTV = one.change(logits_BTV, counts, neutral_B[:, None, None].to(dtype))
    least_B11 = context.sampling_BX[:, _LEAST, None, None]
    is_first_BT1 = (context.last_BT + 1 - context.prompt_lengths_B[:, None])[..., None] < least_B11
    return logits_BTV.masked_fill(_ends(context, vocab_size) & is_first_BT1, float("-inf"))


def _ends(context: Context, vocab_size: int) -> Tensor:
    """Return which tokens end the text of each row: (B, 1, V)."""
    ids_BE = context.sampling_BX[:, -MOST_ENDS:].long()
    is_known_BE = (ids_BE >= 0) & (ids_BE < vocab_size)
    counts_BV = torch.zeros(len(ids_BE), vocab_size, device=ids_BE.device)
    return counts_BV.scatter_add_(1, ids_BE * is_known_BE, is_known_BE.to(torch.float32))[:, None] > 0


def _filter(found: SortedCandidates, numbers_BF: Tensor, needed: frozenset[str]) -> None:
    """Apply filters to the rows that have them, in place; see `processors.processor`."""
    for one, number_B in zip(filters(), numbers_BF.unbind(1), strict=True):
        if one.name in needed:
            number_B11 = number_B[:, None, None]
            found.probs.mul_(one.keep(found, number_B11) | (number_B11 == 0))
            found.probs.div_(found.probs.sum(-1, keepdim=True).masked_fill_(number_B11 == 0, 1.0))
