"""A batch on the device: token ids, lengths and limits in fixed shapes, and how a decision advances them.

No value is read back to the host. Rows can advance by different lengths: `lengths_B` alone decides how much of
the token buffer is text, and the next round overwrites the rest.

    tokens row | prompt ....... | generated ..... | drafted, undecided | free ....... |
    position   0                P                 length               length + K     num_slots

Shapes: B sequences, S slots, K drafted tokens, M rounds that a row can have, N uniforms of a round.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from llama_ssp.models.upload import to_device
from llama_ssp.settings.schema import SamplingConfig
from llama_ssp.speculate.engine.masks import Begin
from llama_ssp.speculate.engine.text import StopStrings
from llama_ssp.speculate.engine.verifier import Decision
from llama_ssp.speculate.sampling.by_row import settings_of
from llama_ssp.speculate.sampling.context import Rows
from llama_ssp.speculate.sampling.uniforms import PER_DRAW, UniformTable, prompt_key, row_key

_ALL_DRAFTED = 2**31
_MOST_UNIFORMS = 2**20
"""The most uniforms that are made at a time."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""The golden ratio's fraction: fractions of its multiples are spread evenly, also of a few in sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request for one completion.

    Attributes:
        index: the prompt's index in its file, which no uniform depends on.
        prompt_ids: token ids, at least one.
        sample: number of this sample among several of the prompt.
        num_equal_before: how many equal prompts came before it (`count_equal_before`).
        seed, sampling, stops: replace those of the run; None to take the run's.
        ignores_eos: whether it continues after an end-of-sequence token.
        num_draft_tokens: the most drafted tokens of a round that become its text, in batches whose rows have settings
            of their own; 0 decodes plainly, None takes all.
        stop_ids: more tokens that end it, and stay in its text.
        begin: begins the constraint of its text, which has been prepared; None to prepare it when the request gets a
            row.
        keeps_lengths: whether rounds draft as many tokens as they may while it decodes, since its text depends on the
            number.
    """

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sample: int = 0
    num_equal_before: int = 0
    seed: int | None = None
    sampling: SamplingConfig | None = field(default=None, compare=False)
    stops: StopStrings | None = field(default=None, compare=False)
    ignores_eos: bool = False
    num_draft_tokens: int | None = None
    stop_ids: tuple[int, ...] = ()
    begin: Begin | None = field(default=None, compare=False)
    keeps_lengths: bool = False

    def key(self, seed: int) -> int:
        """The key of its uniforms, in a run of this seed."""
        prompt = prompt_key(self.prompt_ids, num_equal_before=self.num_equal_before)
        seed = seed if self.seed is None else self.seed
        return row_key(seed=seed, prompt=prompt, sample_index=self.sample)


def count_equal_before(prompts: Iterable[tuple[int, ...]]) -> list[int]:
    """For each prompt, how many equal ones came before it."""
    seen: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
    return [next(seen[ids]) for ids in prompts]


class BatchState(NamedTuple):
    """The state of a batch, as tensors on one device.

    Attributes:
        tokens_BS: token ids, int64.
        lengths_B: how many of them are text.
        limits_B: length at which a row ends; equal to the row's length once it has ended.
        first_round_B: the row of the flattened `uniforms_BMN` for a round at length 0.
        keys_B: the key of each row's uniforms.
        prompt_lengths_B: how many tokens are the prompt.
        ahead_B: drafted tokens after the text that wait for verification; 0 but in rounds that overlap (`overlap`).
        most_drafted_B: the most drafted tokens that a round of each row accepts; above every draft where it takes all.
        sampling_BX: settings of each row (`sampling.by_row`); X is 0 if all rows have the settings of the run.
        uniforms_BMN: all uniforms the rows can need; index M is for the round that begins M tokens after the prompt.
        places_B: the numbers of the rows among the rows of the caches; empty if they are all of them, in order.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    limits_B: Tensor
    first_round_B: Tensor
    keys_B: Tensor
    prompt_lengths_B: Tensor
    ahead_B: Tensor
    most_drafted_B: Tensor
    sampling_BX: Tensor
    uniforms_BMN: Tensor
    places_B: Tensor

    @classmethod
    def empty(
        cls, batch_size: int, *, num_slots: int, num_rounds: int, table: UniformTable, num_settings: int = 0
    ) -> "BatchState":
        """Make a batch whose rows have all ended. Each has two tokens, because a round reads two even of vacant rows.

        The rows' uniforms differ, but are the same on every rank, so that a timed round drafts different tokens as in a
        text.
        """
        tokens_BS = torch.zeros(batch_size, num_slots, dtype=torch.int64, device=table.device)
        shape = batch_size, num_rounds, table.num_uniforms
        uniforms_BMN = torch.arange(math.prod(shape), dtype=torch.float64, device=table.device).mul_(_GOLDEN).frac_()
        lengths_B, limits_B, first_round_B, keys_B, prompts_B, ahead_B, most_B = tokens_BS.new_zeros(
            7, batch_size
        ).unbind()
        sampling_BX = uniforms_BMN.new_zeros(batch_size, num_settings)
        rows = lengths_B, limits_B, first_round_B, keys_B, prompts_B, ahead_B, most_B, sampling_BX
        state = cls(tokens_BS, *rows, uniforms_BMN.view(shape), lengths_B.new_empty(0))
        state.vacate(slice(None))
        return state

    @classmethod
    def of(
        cls, requests: Sequence[Request], *, num_slots: int, num_rounds: int, table: UniformTable, seed: int
    ) -> "BatchState":
        """A batch of these requests' prompts, one row each; `num_rounds` is above the new tokens of each."""
        device, width = table.device, (len(requests), num_rounds, table.num_uniforms)
        tokens_BS = torch.zeros(len(requests), num_slots, dtype=torch.int64)
        numbers = []
        for row, request in enumerate(requests):
            length = len(request.prompt_ids)
            tokens_BS[row, :length] = torch.tensor(request.prompt_ids)
            most = _ALL_DRAFTED if request.num_draft_tokens is None else request.num_draft_tokens
            ends, first = length + request.max_new_tokens, row * num_rounds - length
            numbers.append((length, ends, first, request.key(seed), 0, most))
        found_XB = to_device([*zip(*numbers, strict=True)], device)
        lengths_B, limits_B, first_round_B, keys_B, ahead_B, most_B = found_XB.unbind()
        uniforms_BMN = torch.empty(width, dtype=torch.float64, device=device)
        starts_BM = lengths_B[:, None] + torch.arange(num_rounds, device=device)
        few = max(_MOST_UNIFORMS // uniforms_BMN[0].numel(), 1)
        for first in range(0, len(requests), few):  # not all at a time, to save memory
            some = slice(first, first + few)
            uniforms_BMN[some] = table.uniforms(keys_B[some, None], starts_BM[some])
        sampling_BX = torch.tensor([settings_of(request.sampling) for request in requests], dtype=torch.float64)
        rows = (
            lengths_B,
            limits_B,
            first_round_B,
            keys_B,
            lengths_B.clone(),
            ahead_B,
            most_B,
            to_device(sampling_BX, device),
        )
        return cls(to_device(tokens_BS, device), *rows, uniforms_BMN, lengths_B.new_empty(0))

    @property
    def rows(self) -> Rows:
        """The part of the batch that drafters and rules see."""
        return Rows(
            self.tokens_BS,
            self.lengths_B,
            self.keys_B,
            self.prompt_lengths_B,
            self.sampling_BX,
            limits_B=self.limits_B,
            places_B=self.places_B,
        )

    def put(self, rows_R: Tensor, other: "BatchState") -> None:
        """Scatter the rows of `other`, a batch of equal slots and rounds, into rows `rows_R`."""
        moved_R = rows_R - torch.arange(other.tokens_BS.shape[0], device=rows_R.device)
        moved = other._replace(first_round_B=other.first_round_B + moved_R * self.uniforms_BMN.shape[1])
        for own, new in zip(self[:-1], moved[:-1], strict=True):
            own.index_copy_(0, rows_R, new)

    def some(self, rows_R: Tensor) -> "BatchState":
        """Return copies of some rows, in this order, with the same uniforms; a row may be repeated."""
        parts = [part.index_select(0, rows_R) for part in self[:-2]]
        return BatchState._make([*parts, self.uniforms_BMN, rows_R])

    def take(self, some: "BatchState") -> None:
        """Copy what a round has changed in `some` rows back to the batch."""
        for name in ("tokens_BS", "lengths_B", "ahead_B"):
            getattr(self, name).index_copy_(0, some.places_B, getattr(some, name))

    def uniforms(self) -> Tensor:
        """The uniforms (B, N) of the round that begins now."""
        return self.uniforms_BMN.flatten(0, 1).index_select(0, self.first_round_B + self.lengths_B)

    def plain_uniforms(self, num_tokens: int) -> Tensor:
        """The uniforms (B, T, P) by which plain decoding draws the next T tokens; arbitrary after a row's end."""
        from_now_T = torch.arange(num_tokens, device=self.lengths_B.device)
        # Limits, not the size of the table, which a trace would keep.
        starts_BT = (self.lengths_B[:, None] + from_now_T).minimum(self.limits_B[:, None])
        rounds_BT = self.first_round_B[:, None] + starts_BT
        found_XN = self.uniforms_BMN.flatten(0, 1).index_select(0, rounds_BT.flatten())
        return found_XN[:, -PER_DRAW:].view(*rounds_BT.shape, PER_DRAW)

    def commit(self, decision: Decision, *drafted_ids_BK: Tensor) -> Tensor:
        """Append the tokens decided on a chain to the text, up to each row's limit.

        The drafted tokens, if any, are in `tokens_BS` already. Returns the round's result (B, K + 3), int64: the
        drafted tokens, -1 for one that does not count, then the decision, which is not cut at the limits.
        """
        lengths_B1 = self.lengths_B.unsqueeze(1)
        lengths_B1.add_(decision.node_B1)
        self.tokens_BS.scatter_(1, lengths_B1, decision.next_ids_B1)
        self.lengths_B.add_(1).clamp_max_(self.limits_B)
        return torch.cat([*drafted_ids_BK, *decision], dim=1)

    def vacate(self, rows: int | slice, *, length: int = 2) -> None:
        """Reset rows in place, as in an empty batch: later rounds may read fewer slots than these rows have filled.

        A vacant row of another `length` costs as much as a row with that many tokens.
        """
        # A number that is assigned to an index is copied from the host, which waits for a GPU.
        self.lengths_B[rows].fill_(length)
        self.limits_B[rows].fill_(length)
        self.first_round_B[rows].fill_(-length)
        self.ahead_B[rows].fill_(0)
        self.sampling_BX[rows].fill_(0)  # temperature 1 and no step
        self.sampling_BX[rows][..., :1].fill_(1)
