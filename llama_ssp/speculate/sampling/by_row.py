"""Sampling settings that differ from row to row of one batch, as requests of a server have them.

The settings of a row are numbers in the batch's tensors: a round does the same operators whatever they are. Greedy rows
are a law too: probability 1 at the best token, which every rule then drafts, accepts and draws.

    settings of a row   | 1 / temperature | top_k | top_p | min_p | 3 penalties | least | M ids | M biases | E ends |

What a row's settings leave out changes no bit of its probabilities, so its text is as in a batch of its own. Sorting
a vocabulary and counting tokens cost time: rounds do so only while a row needs it (`RowSteps`).

Shapes: B sequences, T scored positions, V vocabulary, X settings of a row, M biases, S logits in descending order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_ssp.settings.schema import MOST_BIASES, SamplingConfig
from llama_ssp.speculate.sampling.context import Context, count_tokens
from llama_ssp.speculate.sampling.processors import scale_of

_NUM_NUMBERS, _MOST_KEPT = 8, 2**31
MOST_ENDS = 16
"""E: tokens that end the text of a row, and are banned from its first ones."""
NUM_SETTINGS = _NUM_NUMBERS + 2 * MOST_BIASES + MOST_ENDS
"""X."""


def settings_of(sampling: SamplingConfig | None) -> list[float]:
    """The X settings of a row; none in batches whose rows have the settings of the run."""
    if sampling is None:
        return []
    missing = [0.0] * (MOST_BIASES - len(sampling.logit_bias))
    return [
        scale_of(sampling.temperature) if sampling.temperature else 0.0,
        min(sampling.top_k or 0, _MOST_KEPT), sampling.top_p or 1.0, sampling.min_p or 0.0,
        sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty,
        sampling.min_new_tokens or 0,
        *sampling.logit_bias, *missing, *sampling.logit_bias.values(), *missing,
        *sampling.eos_ids, *[-1.0] * (MOST_ENDS - len(sampling.eos_ids)),
    ]  # fmt: skip


@dataclass(kw_only=True)
class RowSteps:
    """Steps that the rows of a batch need now; the rules of one round, of target and drafts, share this object."""

    truncates: bool = False
    penalizes: bool = False
    limits: bool = False

    def follow(self, samplings: Sequence[SamplingConfig], *, limits: bool) -> None:
        """Take the steps that any of these settings needs; `limits`: a row takes fewer drafted tokens than others."""
        self.truncates = any(sampling.truncates for sampling in samplings)
        self.penalizes = any(sampling.penalizes for sampling in samplings)
        self.limits = limits


class ByRow:
    """Maps logits (B, T, V) and their context to the probabilities that each row's settings ask for.

    Each row equals the result of `context.penalty` and `processors.processor`; fp32, or fp64 of logits in fp64.
    `steps` has the steps that any row of the batch needs now.
    """

    def __init__(self, steps: RowSteps) -> None:
        self.steps = steps

    def __call__(self, logits_BTV: Tensor, context: Context) -> Tensor:
        """See the class; also NaN in a row with NaN."""
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        numbers_XB11 = context.sampling_BX.T[:_NUM_NUMBERS, :, None, None]
        if self.steps.penalizes:
            logits_BTV = _penalized(logits_BTV, context, numbers_XB11[4:])
        scale_B11 = numbers_XB11[0].to(logits_BTV.dtype)
        is_greedy_B11 = scale_B11 == 0
        scaled_BTV = logits_BTV * scale_B11.masked_fill(is_greedy_B11, 1.0)
        probs_BTV = scaled_BTV.softmax(-1)
        if self.steps.truncates:
            probs_BTV = _truncated(probs_BTV, scaled_BTV, *numbers_XB11[1:4])
        best_BTV = probs_BTV * 0.0  # NaN stays
        best_BTV.scatter_add_(-1, logits_BTV.argmax(-1, keepdim=True), torch.ones_like(best_BTV[..., :1]))
        return torch.where(is_greedy_B11, best_BTV, probs_BTV)


def _penalized(logits_BTV: Tensor, context: Context, penalties_4B11: Tensor) -> Tensor:
    vocab_size, dtype = logits_BTV.shape[-1], logits_BTV.dtype
    ids_BM, biases_BM = context.sampling_BX[:, _NUM_NUMBERS:-MOST_ENDS].split(MOST_BIASES, dim=1)
    is_known_BM = ids_BM < vocab_size  # a draft may know fewer
    ids_B1M, biases_B1M = ((part_BM * is_known_BM)[:, None] for part_BM in (ids_BM, biases_BM))
    shape = *logits_BTV.shape[:2], MOST_BIASES
    logits_BTV = logits_BTV.scatter_add(-1, ids_B1M.long().expand(shape), biases_B1M.to(dtype).expand(shape))
    repetition, frequency, presence, least = penalties_4B11.to(dtype)
    first_B = context.prompt_lengths_B
    is_there_BTV = count_tokens(context, torch.zeros_like(first_B), vocab_size=vocab_size) > 0
    scaled_BTV = torch.where(logits_BTV < 0, logits_BTV * repetition, logits_BTV / repetition)
    logits_BTV = torch.where(is_there_BTV, scaled_BTV, logits_BTV)
    counts_BTV = count_tokens(context, first_B, vocab_size=vocab_size).to(dtype)
    found_BTV: Tensor = logits_BTV - frequency * counts_BTV - presence * (counts_BTV > 0)
    is_first_BT1 = (context.last_BT + 1 - first_B[:, None])[..., None] < least
    return found_BTV.masked_fill(_ends(context, vocab_size) & is_first_BT1, float("-inf"))


def _ends(context: Context, vocab_size: int) -> Tensor:
    """Whether a token ends the text of a row (B, 1, V)."""
    ids_BE = context.sampling_BX[:, -MOST_ENDS:].long()
    is_known_BE = (ids_BE >= 0) & (ids_BE < vocab_size)
    counts_BV = torch.zeros(len(ids_BE), vocab_size, device=ids_BE.device)
    return counts_BV.scatter_add_(1, ids_BE * is_known_BE, is_known_BE.to(torch.float32))[:, None] > 0


def _truncated(probs_BTV: Tensor, scaled_BTV: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep the tokens of top-k, then top-p, then min-p, in rows that have them; see `processors.processor`."""

    def kept(is_kept_BTV: Tensor, is_on_B11: Tensor) -> Tensor:
        left_BTV = probs_BTV * is_kept_BTV
        return torch.where(is_on_B11, left_BTV / left_BTV.sum(-1, keepdim=True), probs_BTV)

    largest_BTS, ids_BTS = scaled_BTV.sort(descending=True)
    last_B11 = top_k.long().clamp(1, scaled_BTV.shape[-1]) - 1
    least_BT1 = largest_BTS.gather(-1, last_B11.expand(*scaled_BTV.shape[:2], 1))
    probs_BTV = kept(scaled_BTV >= least_BT1, top_k > 0)
    probs_BTS = probs_BTV.gather(-1, ids_BTS)
    mass_before_BTS = probs_BTS.cumsum(-1, dtype=torch.float64) - probs_BTS
    num_kept_BT1 = (mass_before_BTS < top_p).sum(-1, keepdim=True).clamp_min(1)
    probs_BTV = kept(scaled_BTV >= largest_BTS.gather(-1, num_kept_BT1 - 1), top_p < 1)
    least_BT1 = min_p.to(probs_BTV.dtype) * probs_BTV.amax(-1, keepdim=True)
    return kept(probs_BTV >= least_BT1, min_p > 0)
