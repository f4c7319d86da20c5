"""Rows of a batch as rules see them, and changes of logits: biases, bans, and penalties for tokens that are there.

They come before temperature and the other processors, as in transformers, and are the same for draft and target,
so the text keeps the distribution of the penalised target.

Shapes: B sequences, S slots, T scored positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llama_ssp.settings.processors import numbers_of, penalties
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.sampling.row_steps import RowSteps
from llama_ssp.speculate.sampling.shards import WHOLE, Shard

_OF_THE_RUN = torch.empty(0, 0)


class DraftMasks(Protocol):
    """What the drafts of some rows are drawn from."""

    def __getitem__(self, rows: slice) -> "DraftMasks":
        """The masks of some of the rows."""

    def forbidden(self, drafted: Sequence[Tensor], ids: range) -> Tensor | None:
        """Whether tokens of these ids are forbidden (B, 1, V) after the tokens (B, 1) drafted so far; None: unknown."""


class Rows(NamedTuple):
    """Rows of a batch: token ids, of which `lengths_B` are prompt and text, keys of their uniforms, lengths of prompts.

    Drafted tokens may follow the text; later slots are undefined. For `sampling_BX` see `by_row`. `forced_BK` has
    tokens that a drafter takes in place of its own, and -1 elsewhere; K is 0 if there are none. A row can grow up to
    `limits_B` tokens; if that is empty, no row has ended. `places_B` has the numbers of the rows in caches and in
    tables of a drafter; it is empty if these are all rows, in order. `masks` are those of rows with constraints, if
    there are any. `steps` are those that rows with settings of their own need.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    keys_B: Tensor
    prompt_lengths_B: Tensor
    sampling_BX: Tensor = _OF_THE_RUN
    forced_BK: Tensor = _OF_THE_RUN
    limits_B: Tensor = _OF_THE_RUN
    places_B: Tensor = _OF_THE_RUN
    masks: DraftMasks | tuple[()] = ()
    steps: RowSteps | None = None

    @property
    def places(self) -> Tensor | None:
        """`places_B`, or None if it is empty; see `Runner.forward`."""
        return self.places_B if self.places_B.shape[0] else None

    def before(self, last_BT: Tensor) -> "Context":
        """Return the context of positions, given the indices (B, T) of the last known token before each."""
        return Context(self.tokens_BS, self.keys_B, self.prompt_lengths_B, last_BT, self.sampling_BX, self.steps)

    def some(self, rows: slice) -> "Rows":
        """Return some of the rows."""
        return Rows._make([part if isinstance(part, RowSteps | None) else part[rows] for part in self])


class Context(NamedTuple):
    """The tokens before each scored position: `Rows` up to the token at `last_BT`, which grows by 1 along T."""

    tokens_BS: Tensor
    keys_B: Tensor
    prompt_lengths_B: Tensor
    last_BT: Tensor
    sampling_BX: Tensor = _OF_THE_RUN
    steps: RowSteps | None = None

    def some(self, rows: slice | Tensor) -> "Context":
        """Some of the rows, given by their numbers or as a slice."""
        parts = self.tokens_BS, self.keys_B, self.prompt_lengths_B, self.last_BT, self.sampling_BX
        chosen = [part[rows] if isinstance(rows, slice) else part.index_select(0, rows) for part in parts]
        return Context._make([*chosen, self.steps])


Penalty = Callable[[Tensor, Context], Tensor]
"""Maps logits (B, T, V) and their context to logits (B, T, V)."""


def penalty(sampling: SamplingConfig, shard: Shard = WHOLE) -> Penalty | None:
    """Compose the changes of logits that a sampling config asks for; None if it asks for none.

    As in transformers, biases come first and bans last.
    """
    return _Changes(sampling, shard) if sampling.penalizes else None


class _Changes:
    """The changes of `penalty`; an object, in which executors find the tensors (`workspaces.find_tensors`)."""

    def __init__(self, sampling: SamplingConfig, shard: Shard) -> None:
        self._sampling, self._shard = sampling, shard
        self._biases = dict[tuple[int, torch.device], Tensor]()  # made once, so that a capture finds it

    def __call__(self, logits_BTV: Tensor, context: Context) -> Tensor:
        sampling, ids = self._sampling, self._shard.ids(logits_BTV.shape[-1])
        if sampling.logit_bias:
            logits_BTV = self._biased(logits_BTV, ids)
        counts = TokenCounts(context, ids, vocab_size=self._shard.num_of_all(logits_BTV.shape[-1]))
        for one, number in numbers_of(sampling, penalties()):
            logits_BTV = one.change(logits_BTV, counts, number)
        if sampling.bad_ids or (sampling.eos_ids and sampling.min_new_tokens):
            logits_BTV = self._banned(logits_BTV, context, ids)
        return logits_BTV

    def _biased(self, logits_BTV: Tensor, ids: range) -> Tensor:
        key = vocab_size, device = logits_BTV.shape[-1], logits_BTV.device
        if key not in self._biases:
            self._biases[key] = torch.zeros(vocab_size, device=device)
            for token, bias in self._sampling.logit_bias.items():
                if token in ids:  # a draft may know fewer
                    self._biases[key][token - ids.start].fill_(bias)
        return logits_BTV + self._biases[key]

    def _banned(self, logits_BTV: Tensor, context: Context, ids: range) -> Tensor:
        """Ban each token that would complete a bad word, and end-of-sequence tokens among the first new tokens."""
        logits_BTV, last_BT = logits_BTV.clone(), context.last_BT
        is_first_BT = last_BT + 1 - context.prompt_lengths_B[:, None] < (self._sampling.min_new_tokens or 0)
        banned = [(token, is_first_BT) for token in self._sampling.eos_ids if self._sampling.min_new_tokens]
        for *others, last in self._sampling.bad_ids:
            completes_BT = last_BT + 1 >= len(others)
            for distance, token in enumerate(reversed(others)):
                before_BT = context.tokens_BS.gather(1, (last_BT - distance).clamp_min(0))
                completes_BT = completes_BT & (before_BT == token)
            banned.append((last, completes_BT))
        for token, where_BT in banned:
            if token in ids:  # a draft may know fewer
                logits_BTV[..., token - ids.start].masked_fill_(where_BT, float("-inf"))
        return logits_BTV


class TokenCounts:
    """How often the tokens of `ids` occur before each scored position (`settings.processors.Counts`), counted once."""

    def __init__(self, context: Context, ids: range, *, vocab_size: int) -> None:
        self._context, self._own, self._vocab_size = context, slice(ids.start, ids.stop), vocab_size
        self._of_text: Tensor | None = None

    def of_text(self) -> Tensor:
        """In the text without its prompt: fp32 (B, T, V)."""
        if self._of_text is None:
            self._of_text = self._counted(self._context.prompt_lengths_B)
        return self._of_text

    def of_all(self) -> Tensor:
        """In prompt and text: fp32 (B, T, V)."""
        return self._counted(torch.zeros_like(self._context.prompt_lengths_B))

    def _counted(self, first_B: Tensor) -> Tensor:
        return count_tokens(self._context, first_B, vocab_size=self._vocab_size)[..., self._own]


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
