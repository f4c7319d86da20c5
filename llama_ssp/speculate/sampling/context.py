"""Rows of a batch as rules see them, and changes of logits: biases, bans, and penalties for tokens that are there.

They come before temperature and the other processors, as in transformers, and are the same for draft and target,
so the text keeps the distribution of the penalised target.

Shapes: B sequences, S slots, T scored positions, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.shards import WHOLE, Shard

_OF_THE_RUN = torch.empty(0, 0)


class Rows(NamedTuple):
    """Rows of a batch: token ids, of which `lengths_B` are prompt and text, the keys of their uniforms, the prompts.

    Drafted tokens may stand behind the text; the slots behind them are undefined. For `sampling_BX` see `by_row`.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    keys_B: Tensor
    prompt_lengths_B: Tensor
    sampling_BX: Tensor = _OF_THE_RUN

    def before(self, last_BT: Tensor) -> "Context":
        """The context of positions whose last known token stands at `last_BT` (B, T)."""
        return Context(self.tokens_BS, self.keys_B, self.prompt_lengths_B, last_BT, self.sampling_BX)


class Context(NamedTuple):
    """The tokens before each scored position: those of `Rows` up to the one at `last_BT`, which grows by 1 along T."""

    tokens_BS: Tensor
    keys_B: Tensor
    prompt_lengths_B: Tensor
    last_BT: Tensor
    sampling_BX: Tensor = _OF_THE_RUN


Penalty = Callable[[Tensor, Context], Tensor]
"""Maps logits (B, T, V) and their context to logits (B, T, V)."""


def penalty(sampling: SamplingConfig, shard: Shard = WHOLE) -> Penalty | None:
    """Compose the changes of a sampling config, biases first and bans last, as transformers; None without any."""
    if not sampling.penalizes:
        return None
    bias = _Bias(sampling.logit_bias, shard) if sampling.logit_bias else None
    steps = [step for step in (bias, _counted(sampling, shard), _bans(sampling, shard)) if step]

    return _Changes(steps)


class _Changes:
    """Changes in their order, as an object: executors find the tensors that they keep (`workspaces.find_tensors`)."""

    def __init__(self, steps: Sequence[Penalty]) -> None:
        self._steps = steps

    def __call__(self, logits_BTV: Tensor, context: Context) -> Tensor:
        for step in self._steps:
            logits_BTV = step(logits_BTV, context)
        return logits_BTV


class _Bias:
    def __init__(self, biases: Mapping[int, float], shard: Shard) -> None:
        self._biases, self._shard = biases, shard
        self._tables = dict[tuple[int, torch.device], Tensor]()  # made once, so that a capture finds it

    def __call__(self, logits_BTV: Tensor, _context: Context) -> Tensor:
        key = vocab_size, device = logits_BTV.shape[-1], logits_BTV.device
        if key not in self._tables:
            # A draft may know fewer tokens.
            ids = self._shard.ids(vocab_size)
            known = {token - ids.start: bias for token, bias in self._biases.items() if token in ids}
            bias_V = torch.zeros(vocab_size)
            bias_V[[*known]] = torch.tensor([*known.values()])
            self._tables[key] = bias_V.to(device)
        return logits_BTV + self._tables[key]


def _bans(sampling: SamplingConfig, shard: Shard) -> Penalty | None:
    """Bad words are never completed, and no end-of-sequence token is among the first new tokens."""
    words, eos_ids, num_first = sampling.bad_ids, sampling.eos_ids, sampling.min_new_tokens or 0
    if not words and not (eos_ids and num_first):
        return None

    def apply(logits_BTV: Tensor, context: Context) -> Tensor:
        logits_BTV, last_BT, ids = logits_BTV.clone(), context.last_BT, shard.ids(logits_BTV.shape[-1])

        def ban(token: int, where_BT: Tensor) -> None:
            if token in ids:  # a draft may know fewer
                logits_BTV[..., token - ids.start].masked_fill_(where_BT, float("-inf"))

        for *others, last in words:
            completes_BT = last_BT + 1 >= len(others)
            for distance, token in enumerate(reversed(others)):
                before_BT = context.tokens_BS.gather(1, (last_BT - distance).clamp_min(0))
                completes_BT = completes_BT & (before_BT == token)
            ban(last, completes_BT)
        is_first_BT = last_BT + 1 - context.prompt_lengths_B[:, None] < num_first
        for token in eos_ids if num_first else ():
            ban(token, is_first_BT)
        return logits_BTV

    return apply


def _counted(sampling: SamplingConfig, shard: Shard) -> Penalty | None:
    """The penalties that count tokens.

    Source: Keskar et al. 2019, arXiv:1909.05858 (repetition, over prompt and text as in transformers); the frequency
        and presence penalties are those of OpenAI's API and of vLLM, counted over the text without its prompt.
    """
    repetition, frequency, presence = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    if (repetition, frequency, presence) == (1.0, 0.0, 0.0):
        return None

    def apply(logits_BTV: Tensor, context: Context) -> Tensor:
        vocab_size, first_B = shard.num_of_all(logits_BTV.shape[-1]), context.prompt_lengths_B
        ids = shard.ids(logits_BTV.shape[-1])
        own = slice(ids.start, ids.stop)
        if repetition != 1.0:
            is_known_BTV = count_tokens(context, torch.zeros_like(first_B), vocab_size=vocab_size)[..., own] > 0
            scaled_BTV = torch.where(logits_BTV < 0, logits_BTV * repetition, logits_BTV / repetition)
            logits_BTV = torch.where(is_known_BTV, scaled_BTV, logits_BTV)
        if frequency or presence:
            counts_BTV = count_tokens(context, first_B, vocab_size=vocab_size)[..., own].to(logits_BTV.dtype)
            logits_BTV = logits_BTV - frequency * counts_BTV - presence * (counts_BTV > 0)
        return logits_BTV

    return apply


def count_tokens(context: Context, first_B: Tensor, *, vocab_size: int) -> Tensor:
    """Count every token of the vocabulary from `first_B` on before each scored position: fp32 (B, T, V)."""
    tokens_BS, last_BT, first_B1 = context.tokens_BS, context.last_BT, first_B[:, None]
    batch_size, num_positions = last_BT.shape
    places_BS = torch.ones_like(tokens_BS).cumsum(1) - 1  # unlike a range, right for any number of slots in a trace
    is_before_BS = ((places_BS >= first_B1) & (places_BS <= last_BT[:, :1])).to(torch.float32)
    counts_BV = torch.zeros(batch_size, vocab_size, device=tokens_BS.device)
    counts_T = [counts_BV.scatter_add(1, tokens_BS * is_before_BS.long(), is_before_BS)]
    for position in range(1, num_positions):
        last_B1 = last_BT[:, position : position + 1]
        counted_B1 = (last_B1 >= first_B1).to(torch.float32)
        counts_T.append(counts_T[-1].scatter_add(1, tokens_BS.gather(1, last_B1), counted_B1))
    return torch.stack(counts_T, dim=1)
